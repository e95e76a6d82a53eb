"""Refuses a Trainer of TRL that generates with vLLM, or asks a teacher's server, where it is not there.

TRL raises on rank 0 alone, in the middle of the Trainer's construction or in the first step, so that the other ranks
wait until their launcher ends them. Here rank 0 asks each server as TRL would, and every rank raises the same line.
"""

import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from transformers import Trainer

from hfscale.core import distributed
from hfscale.core.collectives import TRAINING
from hfscale.core.spelling import spelled
from hfscale.errors import MissingDependencyError, ParameterError
from hfscale.trainer.frames import constructor_arguments

_WAIT_S = 60.0
"""Seconds that TRL waits for the server of a teacher, for which it has no training argument."""
_POLL_S = 2.0
_ANSWER_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Server:
    """Holds a server of vLLM that a training needs."""

    setting: str
    """The training argument that names it."""
    url: str
    """Its address, such as `http://localhost:8000`."""
    wait_s: float
    """Seconds that it may take to start."""
    asked: str = "/health"
    """What it must answer: a server that does not take weights has no `/get_world_size`."""


def check_generation_servers(trainer: Trainer) -> None:
    """Raise on every rank if vLLM, or a server that a Trainer under construction needs, is not there.

    Args:
        trainer (`Trainer`): its constructor, or that of its base class, is on the call stack; else nothing is done.

    Raises:
        MissingDependencyError: vLLM is not installed.
        ParameterError: the address of a server is none, or nothing answers there in the time that the arguments give.
    """
    given = constructor_arguments(trainer)
    if given is None:
        return
    setting = _setting_of_vllm(trainer.args, given)
    servers = servers_of(trainer.args, given)
    if setting is None and not servers:
        return
    with TRAINING.agreed("generation servers"):
        if setting is not None and not _vllm_is_installed():
            raise MissingDependencyError(
                f"{setting} needs vLLM, which is not installed: pip install 'trl[vllm]', or choose a Trainer that "
                "generates with transformers"
            )
        if distributed.rank() == 0:
            for server in servers:
                _wait_for(server)


def servers_of(args: Any, given: Mapping[str, Any]) -> list[Server]:
    """Return the servers that the training arguments of a Trainer of TRL name and that it will ask.

    Args:
        args (`TrainingArguments`): those of the Trainer.
        given (`Mapping[str, Any]`): the arguments of the Trainer's constructor.
    """
    wait_s = float(getattr(args, "vllm_server_timeout", None) or _WAIT_S)
    found = []
    if _asks_generator(args, given):
        url = args.vllm_server_base_url
        if url is None:
            url = f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        takes_weights = given.get("weight_transfer") is None
        asked = "/get_world_size" if takes_weights else "/health"
        found.append(Server(setting="vllm_server_base_url", url=url, wait_s=wait_s, asked=asked))
    teacher = _teacher_of(args)
    if teacher is not None:
        found.append(Server(setting="teacher_model_server_url", url=teacher, wait_s=_WAIT_S))
    teachers = getattr(args, "teacher_server_urls", None)
    if isinstance(teachers, Mapping) and given.get("rollout_worker") is None:
        for url in teachers.values():
            found.append(Server(setting="teacher_server_urls", url=url, wait_s=wait_s))
    return found


def _asks_generator(args: Any, given: Mapping[str, Any]) -> bool:
    """Return whether a Trainer asks a server of vLLM for completions, or for the longest sequence that fits it."""
    if hasattr(args, "use_vllm"):
        return bool(args.use_vllm) and args.vllm_mode == "server"
    if not hasattr(args, "vllm_server_base_url"):
        return False
    # An asynchronous trainer, which asks it unless each part that would is the caller's
    is_injected = all(given.get(name) is not None for name in ("rollout_worker", "weight_transfer"))
    return not is_injected or args.token_budget is None


def _teacher_of(args: Any) -> str | None:
    """Return the address of a teacher that the process of the training asks; None if it asks none."""
    asks = getattr(args, "use_teacher_server", True)
    return getattr(args, "teacher_model_server_url", None) if asks else None


def _vllm_is_installed() -> bool:
    """Return whether TRL finds vLLM: it is asked only about Trainers of TRL, which have imported it."""
    from trl.import_utils import is_vllm_available

    return bool(is_vllm_available())


def _setting_of_vllm(args: Any, given: Mapping[str, Any]) -> str | None:
    """Return what asks for the package vLLM in the processes of the training; None if nothing does."""
    if getattr(args, "use_vllm", False):
        return spelled("use_vllm", True)
    if _teacher_of(args) is not None:
        return spelled("teacher_model_server_url")
    is_asynchronous = hasattr(args, "vllm_server_base_url") and not hasattr(args, "use_vllm")
    # What sends weights is from vLLM; adapters may be sent as files, which the server decides
    if is_asynchronous and given.get("weight_transfer") is None and not given.get("peft_config"):
        return f"{type(args).__name__} without weight_transfer"
    return None


def _wait_for(server: Server) -> None:
    """Wait until a server answers.

    Args:
        server (`Server`): the server.

    Raises:
        ParameterError: its address is none, or it does not answer in time.
    """
    parts = urlsplit(server.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ParameterError(
            server.setting, server.url, "give an address such as http://localhost:8000"
        )
    until = time.monotonic() + server.wait_s
    while problem := _problem_of(server):
        if time.monotonic() + _POLL_S > until:
            raise ParameterError(
                server.setting,
                server.url,
                f"no server of vLLM answers there in {server.wait_s:g} s ({problem}): start it with vllm serve",
            )
        time.sleep(_POLL_S)


def _problem_of(server: Server) -> str:
    """Return why a server is not ready, or "" if it is.

    Raises:
        ParameterError: it is, and does not have what is asked.
    """
    url = f"{server.url.rstrip('/')}{server.asked}"
    request = urllib.request.Request(url)  # noqa: S310  the scheme was checked
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:  # noqa: S310
            status = response.status
    except urllib.error.HTTPError as error:
        status = error.code
    except (OSError, HTTPException, ValueError) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__
    if status == HTTPStatus.NOT_FOUND:
        rule = f"it has no {server.asked}: start vllm serve with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config"
        raise ParameterError(server.setting, server.url, rule)
    return "" if status == HTTPStatus.OK else f"it answers with {status}"
