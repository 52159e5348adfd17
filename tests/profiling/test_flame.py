"""Flame graph of host stacks: every µs of a step stands once, under its callers, in text and in the picture."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import optexp
from optexp.measurement.recorder import record_stacks
from optexp.profiling import flame
from optexp.profiling.flame import Frame
from optexp.trace import Trace

CPU = torch.device("cpu")


def sleeper() -> None:
    time.sleep(0.02)


def marked() -> None:
    torch.ones(4).exp()


def outer() -> None:
    sleeper()
    with optexp.region("part"):
        marked()
    torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Frame:
    path = tmp_path_factory.mktemp("traces") / "trace.json.gz"
    record_stacks(outer, 2, path, CPU)
    found = flame.frames(Trace.read(path))
    assert found is not None
    return found


def below(frame: Frame) -> list[Frame]:
    return [frame, *(each for child in frame.children.values() for each in below(child))]


def named(root: Frame, text: str) -> Frame:
    return next(frame for frame in below(root) if text in frame.name)


def test_a_function_stands_below_its_caller_with_its_time(root: Frame) -> None:
    caller, sleeping = named(root, ": outer"), named(root, ": sleeper")
    assert sleeping in caller.children.values()
    assert 2 * 20_000 <= sleeping.us <= caller.us <= root.us * 1.01
    assert (caller.kind, named(root, "aten::linear").kind) == ("user", "operator")


def test_frames_of_marks_and_addresses_are_left_out(root: Frame) -> None:
    assert not re.search(r"record_function|ranges\.py|0x[0-9a-f]{6}", flame.collapsed(root))
    assert named(root, ": marked") in named(root, ": outer").children.values()


def test_collapsed_stacks_hold_every_microsecond_once(root: Frame) -> None:
    rows = [line.rsplit(" ", 1) for line in flame.collapsed(root).splitlines()]
    assert all(stack.startswith("step") and count.isdigit() for stack, count in rows)
    assert sum(int(count) for _, count in rows) == pytest.approx(root.us, rel=0.02)
    assert len({stack for stack, _ in rows}) == len(rows)


def test_another_thread_stands_beside_the_steps(tmp_path: Path) -> None:
    """As of a loader that pins memory: its time widens the picture, and hides nothing of the step's."""

    with ThreadPoolExecutor(1) as pool:
        pool.submit(sleeper).result()  # its thread is there before the recording

        def threaded() -> None:
            pool.submit(sleeper).result()
            sleeper()

        record_stacks(threaded, 2, tmp_path / "trace.json.gz", CPU)
    found = flame.frames(Trace.read(tmp_path / "trace.json.gz"))
    assert found is not None
    other = next(child for child in found.children.values() if child.kind == "root")
    assert other.us >= 2 * 20_000
    assert sum(child.us for child in found.children.values()) <= found.us * 1.01
    test_the_picture_is_whole(found)


def test_the_picture_is_whole(root: Frame) -> None:
    picture = ElementTree.fromstring(flame.svg(root, "a <model> & more"))
    boxes = [each for each in picture.iter() if each.get("data-d")]
    assert any("sleeper" in (each[0].text or "") for each in boxes)
    for box in boxes:
        left, width = float(box.get("data-x") or 0), float(box.get("data-w") or 0)
        assert left >= 0
        assert left + width <= flame.WIDTH * 1.01


def test_no_frames_no_picture(tmp_path: Path) -> None:
    assert flame.frames(Trace(steps=())) is None


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no browser")
def test_a_click_widens_a_box(root: Frame, tmp_path: Path) -> None:
    picture = flame.svg(root, "model")
    clicking = """
      const box = boxes.find(b => b.textContent.includes("sleeper"));
      box.onclick();
      const title = document.querySelector(".title");
      title.textContent = "wide " + box.querySelector("rect").getAttribute("width");
    ]]></script>"""
    (tmp_path / "flame.svg").write_text(picture.replace("]]></script>", clicking))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", str(tmp_path / "flame.svg")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert f"wide {flame.WIDTH}" in done.stdout, done.stdout[-500:]
