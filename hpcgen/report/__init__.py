"""What a run tells its user: progress while it works, events for later, a summary at the end."""

from hpcgen.report.events import EventLog, read_events
from hpcgen.report.progress import Counts, Progress
from hpcgen.report.summary import Summary, render

__all__ = ["Counts", "EventLog", "Progress", "Summary", "read_events", "render"]
