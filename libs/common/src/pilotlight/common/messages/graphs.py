"""Worker and its engine child: graphs that are recorded, and graphs that are restored.

Archives do not go through frames. The worker makes a file that nobody else can name
(``worker.graph_files``) and says where it is.
"""

from pilotlight.common.messages.codec import Message
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.materialized import Blob, GraphLayout


class GraphsRecorded(Message, frozen=True, kw_only=True):
    """What came of ``LoadStage.record``: an archive, or the name of what stands in its way."""

    layout: GraphLayout | None = None
    blob: Blob | None = None
    """The archive, as it was written."""
    refused: str = ""
    message: str = ""


class StageGraphs(Message, tag="graphs", frozen=True, kw_only=True):
    """How far the restored graphs of a stage are; told again when that changes."""

    instance_id: InstanceId
    ready: int = 0
    proved: int = 0
    """As many gave what was recorded; each does before its first use."""
    refused: str = ""
    """By name, why no (further) graph is restored: graphs are captured as they are used."""
    message: str = ""
