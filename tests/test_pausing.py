"""A paused process, and all that it started, does nothing until it is resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

from optexp.support.descent import descendants
from optexp.support.pausing import end, is_paused, pause, resume
from optexp.support.resuming_at_end import ResumingAtEnd

COUNTS = """
import os, sys, time
from pathlib import Path
if len(sys.argv) < 3:
    import subprocess
    subprocess.Popen([sys.executable, __file__, sys.argv[1], "child"])
place = Path(sys.argv[1], sys.argv[-1] if len(sys.argv) > 2 else "parent")
while True:
    place.write_text(str(time.monotonic()))
    time.sleep(0.005)
"""


CHAIN = """
import os, sys, time
from optexp.support.descent import adopt_orphans
adopt_orphans()
if not os.fork():
    os.setsid()
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        if os.fork():
            os._exit(0)
        with open(sys.argv[1], "w") as place:
            place.write(str(os.getpid()))
while True:
    time.sleep(1)
"""


def test_a_process_that_starts_another_and_ends_does_not_outlive_all_others(tmp_path: Path) -> None:
    place = tmp_path / "last"
    process = subprocess.Popen([sys.executable, "-c", CHAIN, place])
    while not place.exists():
        time.sleep(0.01)
    end(process.pid)
    process.wait()
    last = place.read_text()
    time.sleep(0.2)
    assert place.read_text() == last


USES = """
import sys, time
from optexp.support import pausing
pausing.count_pauses()
used = pausing.Used()
print("ready", flush=True)
sys.stdin.readline()
print(pausing.pauses(), used.seconds(), flush=True)
time.sleep(0.2)
print(used.seconds(), flush=True)
"""


def test_a_pause_is_counted_and_its_time_is_not() -> None:
    process = subprocess.Popen([sys.executable, "-c", USES], stdin=-1, stdout=-1, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    pause(process.pid)
    time.sleep(0.5)
    resume(process.pid)
    process.stdin.write("\n")
    process.stdin.flush()
    count, used = process.stdout.readline().split()
    assert count == "1"
    assert float(used) < 0.2
    assert float(process.stdout.readline()) >= 0.2
    process.wait()


def written(folder: Path) -> list[str]:
    return [(folder / name).read_text() for name in ("parent", "child")]


def test_a_process_and_what_it_started_stand_still(tmp_path: Path) -> None:
    (tmp_path / "counts.py").write_text(COUNTS)
    process = subprocess.Popen([sys.executable, tmp_path / "counts.py", tmp_path])
    try:
        while not (tmp_path / "child").exists():
            time.sleep(0.01)
        (child,) = descendants(process.pid)
        pause(process.pid)
        assert is_paused(process.pid)
        assert is_paused(child)
        before = written(tmp_path)
        time.sleep(0.1)
        assert written(tmp_path) == before
        resume(process.pid)
        limit = time.monotonic() + 10
        while any(now == then for now, then in zip(written(tmp_path), before, strict=True)):
            assert time.monotonic() < limit
            time.sleep(0.01)
    finally:
        for pid in (*descendants(process.pid), process.pid):
            subprocess.run(["kill", "-9", str(pid)], check=False)
        process.wait()
    assert not is_paused(process.pid)
    pause(process.pid)  # it is gone: nothing to do


PAUSES = """
import os, signal, subprocess
from optexp.support.pausing import pause
from optexp.support.resuming_at_end import ResumingAtEnd
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
resuming = ResumingAtEnd()
pause(child.pid, tell=resuming.tell)
print(child.pid, flush=True)
signal.pause()
"""


def test_a_paused_process_goes_on_when_the_one_that_paused_it_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", PAUSES], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    paused = int(process.stdout.readline())
    try:
        assert is_paused(paused)
        process.kill()
        process.wait()
        limit = time.monotonic() + 10
        while is_paused(paused):
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert Path(f"/proc/{paused}").exists()
    finally:
        end(paused)
        process.stdout.close()


def test_a_resuming_process_that_is_stopped_keeps_nobody_waiting() -> None:
    resuming = ResumingAtEnd()
    os.kill(resuming._process.pid, signal.SIGSTOP)
    closing = Thread(target=resuming.close, daemon=True)
    closing.start()
    closing.join(10)
    try:
        assert not closing.is_alive()
    finally:
        resuming._process.kill()
