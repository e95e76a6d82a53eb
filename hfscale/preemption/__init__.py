"""Word that this machine will go: who brings it, where it stands until the training reads it, how a run then ends.

Signals and cloud notices are collected here; `hfscale.callbacks.preemption_stop` makes all ranks agree on them at a
step boundary.
"""

from hfscale.preemption.clouds import CLOUDS, detect_cloud, watch_cloud
from hfscale.preemption.notice import BOARD, EXIT_CODE, SOURCES, Notice, NoticeBoard, Preempted
from hfscale.preemption.signals import SignalWatch, assumed_notice_s, watch_signals
from hfscale.preemption.workers import Shielding, end_workers, shield_workers

__all__ = [
    "BOARD",
    "CLOUDS",
    "EXIT_CODE",
    "SOURCES",
    "Notice",
    "NoticeBoard",
    "Preempted",
    "Shielding",
    "SignalWatch",
    "assumed_notice_s",
    "detect_cloud",
    "end_workers",
    "shield_workers",
    "watch_cloud",
    "watch_signals",
]
