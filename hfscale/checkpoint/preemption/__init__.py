"""Preemption notices: from signals and clouds, and how a process ends after one.

Notices are collected here; `hfscale.checkpoint.preemption.stop` makes all ranks agree on them at a step boundary.
"""

from hfscale.checkpoint.preemption.clouds import CLOUDS, detect_cloud, watch_cloud
from hfscale.checkpoint.preemption.notice import (
    EXIT_CODE,
    NOTICES,
    SOURCES,
    Notice,
    Preempted,
    PreemptionNotices,
)
from hfscale.checkpoint.preemption.peers import PeerWatch, peers_of, siblings, stop_watching_peers
from hfscale.checkpoint.preemption.signals import SignalWatch, assumed_notice_s, watch_signals
from hfscale.checkpoint.preemption.workers import end_workers, shield_workers

__all__ = [
    "CLOUDS",
    "EXIT_CODE",
    "NOTICES",
    "SOURCES",
    "Notice",
    "PeerWatch",
    "Preempted",
    "PreemptionNotices",
    "SignalWatch",
    "assumed_notice_s",
    "detect_cloud",
    "end_workers",
    "peers_of",
    "shield_workers",
    "siblings",
    "stop_watching_peers",
    "watch_cloud",
    "watch_signals",
]
