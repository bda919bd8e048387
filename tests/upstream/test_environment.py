"""What is no environment, no checkout or not installed is refused with what to do; what hangs is ended."""

from __future__ import annotations

import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.upstream import __main__ as command_line
from tests.upstream import jobs
from tests.upstream.environment import Environment, UpstreamNotFoundError, check_checkout, package_alone, run

pytestmark = pytest.mark.sim_only("about folders and processes")


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """One with two releases, and a folder that is none."""
    for release in ("0.9.2", "0.23.0"):
        for package in ("vllm", "vllm_ascend"):
            (tmp_path / "environment" / release / package).mkdir(parents=True)
    python = tmp_path / "environment" / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    return Environment(tmp_path / "environment")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One of vllm-ascend that is tested with vllm 0.23.0."""
    folder = tmp_path / "checkout"
    for package in ("vllm_ascend", "vllm_ascend/xlite"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").touch()
    (folder / ".github").mkdir()
    (folder / ".github" / "vllm-release-tag.commit").write_text("v0.23.0\n")
    return folder


def exit_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    """Exit code and message of the command."""
    monkeypatch.setattr(sys, "argv", ["tests.upstream", *arguments])
    with pytest.raises(SystemExit) as end:
        command_line.main()
    return end.value.code, capsys.readouterr().err


def test_releases_in_order(environment):
    assert environment.releases == ("0.9.2", "0.23.0")


def test_release_of_a_checkout(environment, checkout):
    assert environment.release_for(checkout) == "0.23.0"


def test_release_that_is_not_installed(environment, checkout):
    (checkout / ".github" / "vllm-release-tag.commit").write_text("v0.27.1\n")
    with pytest.raises(
        UpstreamNotFoundError, match=r"with vllm 0\.27\.1: installed are 0\.9\.2, 0\.23\.0; .* 0\.27\.1:"
    ):
        environment.release_for(checkout)
    with pytest.raises(UpstreamNotFoundError, match=r"vllm 0\.27\.1 is not installed: `tests/upstream/make_env"):
        environment.release("0.27.1")


def test_checkout_that_says_no_release(environment, checkout):
    (checkout / ".github" / "vllm-release-tag.commit").unlink()
    with pytest.raises(UpstreamNotFoundError, match="does not say which vllm it is for"):
        environment.release_for(checkout)


def test_only_the_package_of_a_checkout_is_on_the_path(checkout):
    (checkout / "tests").mkdir()
    with package_alone(checkout) as (folder,):
        assert [entry.name for entry in folder.iterdir()] == ["vllm_ascend"]
        assert (folder / "vllm_ascend" / "xlite").is_dir()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("missing", "text"), [("vllm_ascend", "vllm_ascend is missing"), ("xlite", "xlite is missing")]
)
def test_no_checkout(checkout, missing, text):
    next(checkout.rglob(f"{missing}/__init__.py")).unlink()
    with pytest.raises(UpstreamNotFoundError, match=f"no checkout of vllm-ascend with xlite: .*{text}"):
        check_checkout(checkout)


def test_command_without_an_environment(capsys, monkeypatch, tmp_path, checkout):
    monkeypatch.setenv("NPUSIM_UPSTREAM_ENV", str(tmp_path))
    code, message = exit_of(capsys, monkeypatch, "unit-tests", "--checkout", str(checkout))
    assert code == 2
    assert f"error: {tmp_path} is no environment of upstream's" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("start", "examples/tiny.toml", "--checkout", "nowhere"), "nowhere is no checkout of vllm-ascend"),
        (("start", "examples/tiny.toml", "--release", "0.1.0"), "vllm 0.1.0 is not installed"),
        (("start", "examples/tiny.toml", "--rank", "1"), "--rank 1: allowed are 0 to 0"),
        (("start", "nowhere.toml"), "nowhere.toml: cannot read the scenario"),
    ],
)
def test_command_that_cannot_be_run(capsys, monkeypatch, environment, arguments, text):
    monkeypatch.setenv("NPUSIM_UPSTREAM_ENV", str(environment.folder))
    code, message = exit_of(capsys, monkeypatch, *arguments)
    assert code == 2
    assert f"python -m tests.upstream: error: {text}" in message


def test_output_and_path_of_a_run():
    done = run(["sh", "-c", "echo $PYTHONPATH; exit 3"], (Path("a"), Path("b")))
    assert (done.returncode, done.stdout) == (3, "a:b\n")


def test_a_run_that_hangs_ends_with_its_children():
    """A child that keeps the pipes open does not keep the run from ending."""
    with pytest.raises(TimeoutError, match=r"did not end in 0\.1 s:\nbegun"):
        run(["sh", "-c", "echo begun; sleep 60 & wait"], (), limit_s=0.1)


def killed() -> None:
    signal.raise_signal(signal.SIGKILL)


IN_A_CHILD = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@IN_A_CHILD
@pytest.mark.parametrize(
    ("work", "limit_s", "code"), [(killed, 0, -signal.SIGKILL), (signal.pause, 0.05, -signal.SIGALRM)]
)
def test_a_job_s_process_that_dies_or_hangs(work, limit_s, code):
    assert jobs.in_child(work, limit_s) == code


@IN_A_CHILD
def test_a_job_s_process_that_fails_says_why(capfd):
    assert jobs.in_child(partial(int, "no number")) == 1
    assert "invalid literal" in capfd.readouterr().err
