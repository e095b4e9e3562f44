from pathlib import Path

from pilotlight.common.machine import INHERITED, STANDARD_ERROR, gpus_shown, log_file, memory_bytes


def test_memory_is_no_more_than_the_hosts() -> None:
    (total,) = [
        line.split()[1]
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal")
    ]
    assert 1 << 20 < memory_bytes() <= int(total) * 1024


def test_logs_go_to_a_file_or_where_ours_go(tmp_path: Path) -> None:
    assert log_file(tmp_path, "worker-0.log") == tmp_path / "worker-0.log"
    assert log_file(INHERITED, "worker-0.log") == STANDARD_ERROR


def test_gpus_are_counted_by_the_machines_files_and_by_what_a_process_is_shown(tmp_path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia-uvm", "nvidiactl", "nvidia0a"):
        (tmp_path / name).touch()
    counts = {None: 2, "": 0, "1": 1, "0,1": 2, "0,1,2": 2, "GPU-5c": 1, "0,": 1}
    assert {shown: gpus_shown(shown, tmp_path) for shown in counts} == counts
