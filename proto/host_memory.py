"""Memory that is left on this host, without torch."""

from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_GROUP_USED = Path("/sys/fs/cgroup/memory.current")


def free_memory_bytes() -> int:
    """What the kernel says is available, or what is left of this process's control group, whichever is less."""
    available = next(
        int(line.split()[1]) << 10 for line in _MEMORY.read_text().splitlines() if line.startswith("MemAvailable:")
    )
    limit, used = _number(_GROUP_LIMIT), _number(_GROUP_USED)
    return available if limit is None or used is None else min(available, max(0, limit - used))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
