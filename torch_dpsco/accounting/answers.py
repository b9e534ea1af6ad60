"""Answers that were paid for: kept beside the ledger file, so that a crash after the charge loses none.

A release that is made at once (an estimator, an output perturbation, a score) is charged, drawn and returned. With a
ledger file the order is, each on the disk before the next:

1. a confidential file (mode 0600) with a fresh key and the keyed digest of the records;
2. the charge, with the mark CHARGED of the release (`Book.releases`);
3. the answer, drawn and written into the confidential file;
4. the mark ANSWERED, with the keyed digest of the answer. Only now the answer is returned.

A later accountant on the file makes no second release of what was paid for. The k-th release of a plan gets the charge
of the k-th one that the file knows: marked ANSWERED, the answer that was kept; marked CHARGED, nothing was shown, and
the answer is drawn under the charge that is there. Other records than those of the charge are refused, and so is an
answer that is gone or altered.

Source: docs/proofs/accounting.md#answers-that-were-paid-for
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING, Any, NoReturn

from torch_dpsco.accounting.events import Event, Sequential, event_to_json
from torch_dpsco.accounting.ledger import LOCK
from torch_dpsco.accounting.ledger_file import sync_folder
from torch_dpsco.errors import PrivacyError, outside, warn

if TYPE_CHECKING:
    from torch_dpsco.accounting.accountant import Accountant

CHARGED, ANSWERED = 1, 2  # marks of a release
_NOTHING = Sequential(())
_ANEW = "another ledger (dpsco fit --ledger), or Accountant(..., anew=True), charges it again"


class Answers:
    """What a process knows of the answers of its ledger file.

    Args:
        path: of the ledger file.
        anew: whether answers of earlier processes are left alone, and everything is charged again.
    """

    def __init__(self, path: str, anew: bool) -> None:
        self.path = path
        self._anew = anew
        self._begun: set[str] = set()  # releases of this process
        self._taken: set[str] = set()  # of them, those that are answered, or on their way
        self._failed: set[str] = set()  # and those whose draw has failed

    def take(self, plan: str, marked: Callable[[str], int]) -> str:
        """Returns the name of the next release of a plan, which is on its way then."""
        with LOCK:
            for k in itertools.count():
                release = f"answer/{plan}-{k}"
                left_alone = self._anew and marked(release) and release not in self._begun
                if not left_alone and release not in self._taken | self._failed:
                    break
            self._begun.add(release)
            self._taken.add(release)
        return release

    def give_back(self, release: str) -> None:
        """Notes that a release has ended without an answer: whoever asks next gets its charge, if there is one."""
        self._taken.discard(release)

    def fail(self, release: str) -> None:
        """Notes that a draw has failed: its charge is used."""
        self._failed.add(release)


def paid(
    accountant: Accountant,
    event: Event,
    plan: Callable[[], Mapping[str, Any]] | None,
    records: Callable[[str], str],
    draw: Callable[[], Any],
) -> Any:
    """Returns what `Accountant.pay` does, of an accountant with a file."""
    answers = accountant.answers
    title = None if plan is None else _title(plan, event)
    if answers is None or title is None:
        accountant.authorize(event)
        return draw()
    release = answers.take(title, accountant.marked)
    path = f"{answers.path}.{accountant.ledger_id[:8]}-{release.removeprefix('answer/')}.answer"
    try:
        kept = _charged(accountant, event, release, path, records)
        if accountant.marked(release) == ANSWERED:
            return _known(accountant, release, path, kept)
        answer = _drawn(accountant, answers, release, draw)
        _keep(path, {**kept, "answer": answer})
        seal = f"{release}/{_seal(kept, answer)}"
        # PRIVACY: nothing is shown that a restart would draw again (test_a_release_that_dies_anywhere_has_one_answer)
        accountant.authorize(_NOTHING, 0, releases={release: ANSWERED, seal: 1})
    except BaseException:
        answers.give_back(release)
        raise
    return answer


def _title(plan: Callable[[], Mapping[str, Any]], event: Event) -> str | None:
    """Returns what a release is of, and the digest of what is public about it."""
    try:
        row = plan()
        text = json.dumps([row, event_to_json(event)], sort_keys=True)
    except ValueError:  # a function of the caller's
        return None
    kind = row.get("type", next(iter(row), "nothing")).removesuffix("Plan")
    return f"{kind}-{sha256(text.encode()).hexdigest()[:32]}"


def _charged(
    accountant: Accountant, event: Event, release: str, path: str, records: Callable[[str], str]
) -> dict[str, Any]:
    """Returns what the confidential file of a release holds, after charging the release unless that was done."""
    if accountant.marked(release):
        kept = _read(path)
        # PRIVACY: one charge is for one table (test_other_records_get_no_answer_of_these)
        if kept["records"] != records(kept["key"]):
            _refuse(path, "belongs to other records (or to another release of the same plan)")
        return kept
    key = secrets.token_hex(32)
    kept = {"key": key, "records": records(key)}
    _keep(path, kept)
    # PRIVACY: charged before anything is drawn (test_a_release_that_dies_anywhere_has_one_answer)
    accountant.authorize(event, int(event != _NOTHING), releases={release: CHARGED})
    return kept


def _known(accountant: Accountant, release: str, path: str, kept: dict[str, Any]) -> Any:
    """Returns the answer of a file, which the ledger knows."""
    if "answer" not in kept or not accountant.marked(f"{release}/{_seal(kept, kept['answer'])}"):
        # PRIVACY: another answer would be a second one (test_an_answer_that_was_altered_is_refused)
        _refuse(path, "is not the one that the ledger knows")
    warn(
        f"the answer to this plan was paid for by an earlier run and is given again, and nothing is charged; {_ANEW}",
        outside(),
    )
    return kept["answer"]


def _drawn(
    accountant: Accountant, answers: Answers, release: str, draw: Callable[[], Any]
) -> Any:
    try:
        return draw()
    except (KeyboardInterrupt, MemoryError):
        raise  # which no noise has decided: the charge is still to be used
    except BaseException:
        # PRIVACY: that it failed may tell of the noise, and is an answer (test_a_draw_that_failed_is_not_repeated,
        # test_after_a_failed_draw_the_same_process_pays_anew)
        answers.fail(release)
        accountant.authorize(_NOTHING, 0, releases={release: ANSWERED})
        raise


def _refuse(path: str, why: str) -> NoReturn:
    raise PrivacyError(
        f"the answer {path!r}, which the ledger has paid for, {why}: run the same script on the same records; {_ANEW}"
    )


def _seal(kept: Mapping[str, Any], answer: Any) -> str:
    """Returns the keyed digest of an answer."""
    key = bytes.fromhex(kept["key"])
    return blake2b(json.dumps(answer).encode(), key=key, digest_size=16).hexdigest()


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="ascii") as file:
            kept: dict[str, Any] = json.load(file)
        bytes.fromhex(kept["key"])
        str(kept["records"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _refuse(path, f"is gone or damaged ({error})")
    return kept


def _keep(path: str, kept: Mapping[str, Any]) -> None:
    """Writes a confidential file, in the place of an earlier one at once."""
    new = f"{path}.new"
    try:
        with suppress(FileNotFoundError):
            os.unlink(new)  # of a crash, or of somebody who may read it
        # PRIVACY: what is not shown yet is secret (test_the_files_of_answers_are_confidential)
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "w", encoding="ascii") as text:
            json.dump(kept, text)
            text.flush()
            os.fsync(text.fileno())
        os.replace(new, path)
        sync_folder(path)
    except OSError as error:
        raise PrivacyError(
            f"the answer {path!r} could not be kept ({error}), and nothing was shown: make room, and run the same"
            " script again; what was charged is used then"
        ) from error
