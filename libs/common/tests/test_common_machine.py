from pathlib import Path

from pilotlight.common.machine import INHERITED, STANDARD_ERROR, log_file, memory_bytes


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
