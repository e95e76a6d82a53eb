"""How a recipe ends: errors of the disk, an output directory that cannot be written, and the exit codes."""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny import tiny_trainer

from hfscale import ScalingCallback
from hfscale.core.disk_errors import storage_error
from hfscale.core.run_files import LOCK_NAME
from hfscale.core.spelling import speaking
from hfscale.errors import MissingDependencyError, StorageError, UsageError
from hfscale.recipe import finish, models
from hfscale.recipe.entrypoint import check_output_dir, missing_dependency
from hfscale.recipe.model_arguments import ModelArguments


@contextmanager
def largest_file(bytes_: int) -> Iterator[None]:
    """Limit the size of files, so that writes fail as they do on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def raised(by: Callable[[], object]) -> BaseException:
    """Return the error that `by` raises."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011 (whatever it is)
        by()
    return caught.value


def caused(error: BaseException, by: BaseException, *, hidden: bool = False) -> BaseException:
    """Return `error` as `raise error from by` makes it, or with `hidden` as `raise error from None` does."""
    error.__context__ = by
    if hidden:
        error.__suppress_context__ = True
    else:
        error.__cause__ = by
    return error


# Errors of the disk.


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_the_error_of_a_full_disk_names_the_file_and_the_fix(code: int) -> None:
    found = storage_error(OSError(code, os.strerror(code), "runs/a/file"))
    assert isinstance(found, StorageError)
    assert str(found).startswith(f"writing stopped at runs/a/file: {os.strerror(code)}; ")
    assert str(found).endswith("make room and relaunch the same command")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_forbidden_file_is_not_a_full_disk(code: int) -> None:
    found = storage_error(OSError(code, os.strerror(code), "runs/a/file"))
    assert isinstance(found, StorageError)
    assert str(found).startswith(f"no access at runs/a/file: {os.strerror(code)}: ")
    assert "make room" not in str(found)


def test_the_cause_is_found_at_any_depth() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "x")
    nested = caused(RuntimeError("save failed"), caused(ValueError("inner"), full))
    assert "at x: No space left" in str(storage_error(nested))
    while_handling = RuntimeError("save failed")
    while_handling.__context__ = full
    assert storage_error(while_handling) is not None
    assert storage_error(caused(ValueError("a flag"), full, hidden=True)) is None
    defect = AttributeError("of the code that handled the full disk")
    defect.__context__ = full
    assert storage_error(defect) is None


@pytest.mark.parametrize(
    "text",
    [
        'Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })',
        "Error while serializing: I/O error: No space left on device (os error 28)",
        "No space left on device (os error 28)",
        "[enforce fail at inline_container.cc:863] . PytorchStreamWriter failed writing file data/3: write failed",
        "[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534",
        "write(): fd 3 failed with No space left on device",
    ],
)
def test_a_full_disk_is_recognised_in_the_messages_of_libraries(text: str) -> None:
    assert str(storage_error(RuntimeError(text))).startswith("writing stopped: ")


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory", "x"),
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        PermissionError(errno.EACCES, "Permission denied"),  # a socket: no file
        RuntimeError("NCCL error: unhandled system error, code: 28"),
        RuntimeError("the server answered with status code: 13"),
        RuntimeError("No such file or directory (os error 2)"),
        RuntimeError("CUDA out of memory"),
        ValueError(28),
    ],
)
def test_other_errors_are_not_errors_of_the_disk(error: BaseException) -> None:
    assert storage_error(error) is None


def test_what_the_installed_libraries_raise_on_a_full_disk_is_recognised(tmp_path: Path) -> None:
    tensors = {"weight": torch.zeros(100_000)}
    target = tmp_path / "file"

    def through_a_file() -> None:
        with target.open("wb") as file:
            torch.save(tensors, file)

    writers: list[Callable[[], Any]] = [
        lambda: torch.save(tensors, target),
        lambda: torch.save(tensors, target, _use_new_zipfile_serialization=False),
        through_a_file,
        lambda: safetensors.torch.save_file(tensors, target),
        lambda: target.write_bytes(b"0" * 400_000),
    ]
    with largest_file(100_000):
        errors = [raised(writer) for writer in writers]
    for error in errors:
        assert "writing stopped" in str(storage_error(error)), repr(error)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ImportError("You need to install `bitsandbytes`: `pip install -U bitsandbytes`"), True),
        (ImportError("liger-kernel >= 0.3.0 is not available"), True),
        (RuntimeError("TensorBoardCallback requires tensorboard to be installed. Either update your"), True),
        (RuntimeError("CometCallback requires comet-ml to be installed. Run `pip install comet-ml`."), True),
        (ModuleNotFoundError("No module named 'nothere'", name="nothere"), False),
        (ImportError("cannot import name 'x' from 'y'", name="y"), False),
        (RuntimeError("CUDA out of memory"), False),
    ],
)
def test_a_package_to_install_is_distinguished_from_a_failing_import(error: Exception, expected: bool) -> None:
    found = missing_dependency(error)
    assert (found is not None) == expected
    assert found is None or (isinstance(found, MissingDependencyError) and str(found) == str(error))


# The output directory.


def test_an_output_directory_is_created_with_only_the_lock(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    check_output_dir(str(folder))
    check_output_dir(str(folder))
    assert [path.name for path in folder.iterdir()] == [LOCK_NAME]


def test_a_file_as_output_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for output_dir in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "file" / "far" / "below"):
        with pytest.raises(UsageError, match="is a file") as caught:
            check_output_dir(str(output_dir))
        assert str(caught.value).startswith(f"--output_dir {output_dir} ")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_created_is_named() -> None:
    with pytest.raises(StorageError, match=r"^--output_dir /proc/hfscale/run cannot be written: ") as caught:
        check_output_dir("/proc/hfscale/run")
    assert "name another" in str(caught.value)


def test_a_full_disk_is_found_before_training_and_the_probe_is_removed(tmp_path: Path) -> None:
    with (
        largest_file(1000),
        pytest.raises(StorageError, match=f"--output_dir {tmp_path} cannot be written: File too large"),
    ):
        check_output_dir(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_another_rank_removed_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_bytes

    def write_and_lose(path: Path, content: bytes) -> int:
        written = write(path, content)
        path.unlink()
        return written

    monkeypatch.setattr(Path, "write_bytes", write_and_lose)
    check_output_dir(str(tmp_path))


# Exit codes, each in its own process.

ENDINGS = """
import os, sys
from hfscale import errors
from hfscale.recipe import entrypoint

def cause():
    try:
        raise OSError(28, "No space left on device", "runs/x")
    except OSError as error:
        raise RuntimeError("saving failed") from error

def throw(error):
    raise error

endings = {
    "usage": lambda: throw(errors.DataError("--train_file x\\nis empty")),
    "storage": cause,
    "cannot": lambda: throw(errors.StrategyMismatchError("not the strategy asked for")),
    "install": lambda: throw(ImportError("needs `pip install x`")),
    "bug": lambda: throw(KeyError("a bug")),
    "import": lambda: __import__("nothere"),
    "exit": lambda: sys.exit(75),
    "fine": lambda: None,
    "rank1": lambda: throw(errors.UsageError("only here")),
}
entrypoint._MAIN_PROCESS_GRACE_S = 0.1
for name, main in endings.items():
    child = os.fork()
    if child == 0:
        print(f"== {name}", file=sys.stderr, flush=True)
        if name == "rank1":
            os.environ["RANK"] = "1"
        entrypoint.run(main)
        sys.exit(0)
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_exit_codes_and_lines(python: Callable[..., Any]) -> None:
    done = python("-c", ENDINGS)
    codes = dict(line.split() for line in done.out.splitlines())
    sections = done.err.split("== ")[1:]
    said = {name: text for name, _, text in (section.partition("\n") for section in sections)}
    assert codes == {
        "usage": "2",
        "storage": "1",
        "cannot": "1",
        "install": "2",
        "bug": "1",
        "import": "1",
        "exit": "75",
        "fine": "0",
        "rank1": "2",
    }
    assert said["usage"] == "hfscale: error: --train_file x is empty\n"
    assert said["cannot"] == "hfscale: error: not the strategy asked for\n"
    assert said["install"] == "hfscale: error: needs `pip install x`\n"
    assert said["rank1"] == "hfscale: error on rank 1: only here\n"
    assert said["storage"].startswith("hfscale: error: writing stopped at runs/x: No space left on device; ")
    assert said["storage"].count("\n") == 1
    for name, last in (("bug", "KeyError: 'a bug'"), ("import", "ModuleNotFoundError: No module named 'nothere'")):
        assert said[name].startswith("Traceback")
        assert said[name].rstrip().endswith(last)
        assert "hfscale: error" not in said[name]
    assert said["fine"] == said["exit"] == ""


@pytest.mark.parametrize(
    ("metrics", "row"),
    [
        ({"eval_loss": 1.25}, ("evaluation loss", "1.2500")),
        ({"eval_loss": -0.0, "eval_reward": 0.75}, ("evaluation reward", "0.7500")),  # of GRPO
    ],
)
def test_the_summary_has_the_evaluation_that_says_something(tmp_path, metrics, row):
    callback = ScalingCallback()
    rows = finish._summary_rows(tiny_trainer(tmp_path, callback), callback, metrics)
    assert [found for found in rows if found[0].startswith("evaluation")] == [row]


def test_packing_without_the_kernel_that_keeps_documents_apart_is_one_line():
    message = "`causal_conv1d_fn` can't keep packed sequences apart without `causal_conv1d`. Install `causal_conv1d`."
    refused = pytest.raises(MissingDependencyError, match="Or give --packing false")
    with speaking("recipe"), refused, finish._errors_name_packing():
        raise ValueError(message)
    with pytest.raises(ValueError, match="another"), finish._errors_name_packing():
        raise ValueError("another")


def test_dropout_of_adapters_of_experts_names_the_flag():
    args = ModelArguments(use_peft=True, lora_dropout=0.05)
    refused = pytest.raises(UsageError, match=r"--lora_dropout 0\.05 .* name --lora_target_modules")
    with speaking("recipe"), refused, models._errors_name_adapters(args):
        raise ValueError("lora.ParamWrapper does not work with lora_dropout != 0.")
