"""Find files by a path, a registered name, or a repository on the Hub."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class NamedFiles:
    """The files of one kind.

    Attributes:
        no: beginning of messages about a missing file: "No calibration".
        made_by: the command that writes such files.
        file_name: name of the file in a repository on the Hub; None if they are not on the Hub.
    """

    no: str
    made_by: str
    file_name: str | None = None
    named: dict[str, Path] = field(default_factory=dict)

    def name(self, name: str, path: Path) -> None:
        """Register a name for a file, for files that come with a package."""
        self.named[name] = path

    def is_here(self, name: str) -> bool:
        """Whether the file of a name is on this machine."""
        return self._find_here(name)[1] is not None

    def _find_here(self, name: str) -> tuple[Path, Path | None]:
        """The name as a path, and the file that it stands for."""
        try:
            path = Path(name).expanduser()
        except RuntimeError:  # there is no home directory
            path = Path(name)
        if path.is_file():
            return path, path
        return path, self.named[name] if name in self.named and self.named[name].is_file() else None

    def find(self, name: str) -> Path:
        """The local path of a name's file, downloaded if necessary.

        Raises:
            ValueError: there is no such file.
        """
        path, file = self._find_here(name)
        if file is not None:
            return file
        parts = name.split("/")
        if self.file_name is None or len(parts) != 2 or not all(parts) or path.suffix or name.startswith((".", "~")):
            raise ValueError(self._missing(name, "there is no such file"))
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(name, self.file_name))
        except Exception as error:  # the client has a class for each kind of failure
            raise ValueError(self._missing(name, f"there is no such file, and the Hub says: {error}")) from error

    def _missing(self, name: str, reason: str) -> str:
        expected = [f"a file that `{self.made_by}` wrote"]
        if self.named:
            expected.append(f"one of the names {', '.join(sorted(self.named))}")
        if self.file_name is not None:
            expected.append(f"a repository on the Hugging Face Hub (organisation/name) with a file {self.file_name}")
        return f"{self.no} {name!r}: {reason}. Expected {', or '.join(expected)}."
