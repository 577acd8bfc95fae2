"""What the server keeps, and for how long: files until they are deleted or expire, the directory of an ended batch as
long as a file of the batch is there."""

import logging
import os
import shutil

from hpcgen.server.settings import Places
from hpcgen.server.store import Store

_log = logging.getLogger(__name__)


def remove_expired(store: Store, places: Places) -> None:
    """Files whose time is over, and directories that nothing is left of."""
    for id in store.forget_expired_files():
        places.file(id).unlink(missing_ok=True)
    present = os.listdir(places.batches)
    for name in store.batches_without_files().intersection(present):
        _log.info("%s: its files are gone, and so is its run directory", name)
        shutil.rmtree(places.batch(name), ignore_errors=True)


def remove_orphans(store: Store, places: Places) -> None:
    """What a crash left without an entry in the store, and what `remove_expired` does. Nobody may be uploading."""
    remove_expired(store, places)
    known = store.all_file_ids()
    for path in places.files.iterdir():
        if path.name not in known:
            path.unlink(missing_ok=True)
    # A batch whose creation was cut off was never accepted.
    for name in set(os.listdir(places.batches)) - store.all_batch_ids():
        shutil.rmtree(places.batch(name), ignore_errors=True)
