"""A head set as users see it: its content, and how to load, save and share it."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from juice.head_set import hub, lens, storage
from juice.head_set.lens import LensHooks
from juice.head_set.schema import HeadSetContent, Method


class HeadSet(HeadSetContent):
    """Which heads steer which model toward what, and how strongly.

    Immutable, and valid once it exists.
    """

    def __repr__(self) -> str:
        signs = (("+", self.heads.plus), ("-", self.heads.minus))
        heads = " ".join(f"{sign}{head}" for sign, own in signs for head in own)
        betas = self.betas()
        tuned = f"betas {betas.plus:+g} {betas.minus:+g}" if betas else "untuned"
        return f"<HeadSet {self.name!r} toward {self.target} for {self.model.id}: {heads}; {tuned}>"

    __str__ = __repr__

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load and verify a head set's folder; raises HeadSetError."""
        return storage.load(Path(path), cls)

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Save to a folder in one step and make its parents.

        Raises:
            OutputError: The folder cannot be written, or exists and must not be overwritten.
        """
        storage.save(self, Path(path), overwrite=overwrite)

    @classmethod
    def from_pretrained(
        cls,
        repo_id_or_folder: str | Path,
        *,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        force_download: bool = False,
    ) -> Self:
        """Load and verify a head set from a local folder or, through the cache, from the hub.

        Args:
            repo_id_or_folder: A hub id such as owner/name, or a folder.
            revision: A branch, tag or commit.
            subfolder: The set's folder in the repository; None: its root.
            token: A hub token; None: the saved one, or HF_TOKEN.
            force_download: Download again what is in the cache.

        Raises:
            HeadSetNotFoundError: There is no such folder or repository, no access or no connection.
            HeadSetError: The set is damaged.
        """
        return hub.pull(
            repo_id_or_folder,
            cls,
            revision=revision,
            subfolder=subfolder,
            token=token,
            force_download=force_download,
        )

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
    ) -> str:
        """Commit this set and a generated model card to the root of a hub repository.

        An earlier set and card there are replaced.

        Args:
            repo_id: The repository, such as owner/name; created if missing.
            private: Make a new repository private.
            token: A hub token; None: the saved one, or HF_TOKEN.
            commit_message: The commit's message; None: one that names the set.
            revision: The branch to commit to.
            create_pr: Open a pull request instead.

        Returns:
            The commit's URL.

        Raises:
            OutputError: The hub refuses the commit or cannot be reached.
        """
        return hub.push(
            self,
            repo_id,
            private=private,
            token=token,
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )

    def to_lens_hooks(
        self,
        *,
        beta_plus: float | None = None,
        beta_minus: float | None = None,
        strength: float = 1.0,
        method: Method = "juice",
    ) -> LensHooks:
        """Return TransformerLens hooks: `record` for the clean run, `steer` for the steered run.

        Args:
            beta_plus: Scale of the + heads; None: the tuned one.
            beta_minus: Scale of the - heads; None: the tuned one.
            strength: Multiplies both betas.
            method: `juice`, or `june` for the single run, which records nothing.

        Raises:
            RequestError: There are no betas, or a value is out of range.
            UsageError: Raised by a steered run without a clean run of the same shape.
        """
        return lens.to_lens_hooks(
            self, beta_plus=beta_plus, beta_minus=beta_minus, strength=strength, method=method
        )
