"""A setting or the machine must be mended first: the process does not start."""

from pilotlight.common.errors.base import PilotlightError


class SettingsInvalid(PilotlightError):
    """A setting or secret is missing or wrong."""

    code = "settings_invalid"
    action = "Mend the setting or the file that the message names, and start again."


class MachineUnfit(PilotlightError):
    """This machine, as it is, will not do."""

    code = "machine_unfit"
    action = (
        "Mend what the message names, and start again; `pilotlight doctor` looks at everything."
    )


class FileLimitTooLow(MachineUnfit):
    """A process may open too few files."""

    code = "file_limit_too_low"
    action = "Raise the hard limit and start again: `ulimit -Hn 65536`, LimitNOFILE= in systemd, `ulimits: nofile` in compose."


class DiskFull(MachineUnfit):
    """There is no room on a disk."""

    code = "disk_full"
    action = "Make room on that disk, or use a folder on another one (PILOTLIGHT_HOME); then start again."


class SharedMemoryTooSmall(MachineUnfit):
    """There is not enough shared memory."""

    code = "shared_memory_too_small"
    action = "Make it larger (`mount -o remount,size=2G /dev/shm`; in a container shm_size), free some, or lower PILOTLIGHT_POOL_BYTES."


class HostPoolTaken(MachineUnfit):
    """Another loader holds the host pool."""

    code = "host_pool_taken"
    action = "Stop the loader that holds it (`fuser` on the file names it), or give this one a file of its own: PILOTLIGHT_POOL_PATH."


class DiskTierTaken(MachineUnfit):
    """Another loader uses the folder of the disk tier."""

    code = "disk_tier_taken"
    action = "Stop the loader that uses it (`fuser` on its file `.lock` names it), or give this one its own: PILOTLIGHT_DISK_TIER_DIR."


class PortTaken(MachineUnfit):
    """The gateway's address cannot be had."""

    code = "port_taken"
    action = "Stop what uses it, or choose another: --port, or PILOTLIGHT_PORT."


class FolderUnusable(MachineUnfit):
    """A folder cannot be written to."""

    code = "folder_unusable"
    action = "Make it writable for this user, or set another one: the message names the setting."
