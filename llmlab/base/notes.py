"""Notes: sentences of a report for people, each with a code for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Note(str):
    """A sentence whose `code` names its kind, so that a program need not read the sentence.

    >>> report_notes = (Note("context-unknown", "The CUDA context of a T4 has not been measured."),)
    >>> [note.code for note in report_notes]
    ['context-unknown']
    """

    code: str

    def __new__(cls, code: str, text: str) -> Note:
        note = super().__new__(cls, text)
        note.code = code
        return note

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return self.code, str(self)  # copies and pickles keep the code


def notes_to_json(notes: Iterable[Note]) -> list[dict[str, str]]:
    """Return the notes as JSON-ready objects with the keys `code` and `text`."""
    return [{"code": getattr(note, "code", ""), "text": str(note)} for note in notes]


def notes_from_json(entries: Iterable[Mapping[str, str] | str]) -> tuple[Note, ...]:
    """Return the notes that `notes_to_json` wrote; a plain string, as in older records, becomes a note of code ""."""
    return tuple(Note("", entry) if isinstance(entry, str) else Note(entry["code"], entry["text"]) for entry in entries)
