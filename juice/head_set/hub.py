"""A head set's repository on the hub: `head_set.json`, a model card and, if any, the scores.

Files come through the hub's cache, all of one commit, and are validated like any other set's. A
push is one commit: whoever pulls sees the old set or the new one. `HF_TOKEN`, `HF_ENDPOINT`,
`HF_HUB_OFFLINE` and the cache's variables work as usual.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    errors,
    snapshot_download,
)

from juice.errors import HeadSetError, HeadSetNotFoundError, OutputError, causes_of, first_line
from juice.head_set.card import card_of
from juice.head_set.naming import public_id
from juice.head_set.reading import JSON_FILE, SCORES_FILE
from juice.head_set.schema import HeadSetContent
from juice.head_set.storage import files_of, load

CARD_FILE = "README.md"


class HubHeadSet(HeadSetContent):
    """A head set that the hub can hold."""

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
        name = str(repo_id_or_folder)
        if Path(name).is_dir():
            return load(Path(name) / (subfolder or ""), cls)
        if isinstance(repo_id_or_folder, Path) or name.startswith((".", "/", "~")):
            raise HeadSetNotFoundError(
                f"there is no folder {name}; "
                "give a head set's folder, or a hub id such as owner/name"
            )
        place = f"{subfolder.strip('/')}/" if subfolder else ""
        try:
            snapshot = snapshot_download(
                name,
                revision=revision,
                token=token,
                force_download=force_download,
                allow_patterns=[place + JSON_FILE, place + SCORES_FILE],
            )
        except Exception as error:  # whatever the network, the hub or a damaged cache raises
            raise HeadSetNotFoundError(
                f"cannot pull the head set {name}: {_explain(error, name, revision)}"
            ) from error
        folder = Path(snapshot) / place
        if not (folder / JSON_FILE).exists():
            at = f" at {revision}" if revision else ""
            raise HeadSetNotFoundError(
                f"the repository {name}{at} has no {place}{JSON_FILE}: there is no head set there; "
                "give the folder of one as subfolder"
            )
        try:
            return load(folder, cls)
        except HeadSetError as error:
            raise HeadSetError(
                f"the head set {name} cannot be used: {error}; "
                "download it again (--force, force_download=True), or tell its author"
            ) from error

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
        api = HfApi(token=token)
        # A model's path on this machine is nobody else's business.
        model = self.model.model_copy(update={"id": public_id(self.model.id)})
        head_set = self.model_copy(update={"model": model})
        try:
            repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            files = {**files_of(head_set), CARD_FILE: card_of(head_set, repo).encode()}
            operations: list[CommitOperationAdd | CommitOperationDelete] = [
                CommitOperationAdd(path_in_repo=name, path_or_fileobj=data)
                for name, data in files.items()
            ]
            if SCORES_FILE not in files and api.file_exists(repo, SCORES_FILE, revision=revision):
                operations.append(CommitOperationDelete(path_in_repo=SCORES_FILE))
            commit = api.create_commit(
                repo,
                operations,
                commit_message=commit_message
                or f"Upload the head set {head_set.name} of {head_set.model.id}",
                revision=revision,
                create_pr=create_pr,
            )
        except Exception as error:  # as above
            raise OutputError(
                f"cannot push the head set to {repo_id}: {_explain(error, repo_id, revision)}"
            ) from error
        return str(commit.pr_url or commit.commit_url)


def _explain(error: Exception, repo_id: str, revision: str | None) -> str:
    """Return in one line what the hub's client raised, and what to do."""
    causes = causes_of(error)

    def has(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    status = next(
        (e.response.status_code for e in causes if isinstance(e, errors.HfHubHTTPError)), None
    )
    if has(errors.HFValidationError):
        return f"{first_line(error)}; a hub id looks like owner/name"
    if has(errors.GatedRepoError):
        return (
            "it is gated: "
            "ask for access on its hub page and set HF_TOKEN to a token that may read it"
        )
    if has(errors.RevisionNotFoundError):
        return f"it has no revision {revision!r}; give one of its branches, tags or commits"
    if has(errors.RepositoryNotFoundError):
        return (
            f"there is no repository {repo_id}, or it is private: "
            "check the name, or set HF_TOKEN to a token that may read it"
        )
    if has(errors.LocalTokenNotFoundError) or status == 401:
        return (
            "the hub does not know this user: "
            "set HF_TOKEN to a valid token, or log in with `hf auth login`"
        )
    if status == 403:
        return "the hub refuses it: set HF_TOKEN to a token that may do this"
    if has(errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set: unset it, or work with a local folder"
    if status:
        return f"the hub answered {status}: {first_line(error)}"
    if (
        has(errors.LocalEntryNotFoundError, ConnectionError, TimeoutError)
        or "Connect" in type(causes[-1]).__name__
    ):
        return "the hub cannot be reached: try again, or work with a local folder"
    return " because of ".join(dict.fromkeys((first_line(error), first_line(causes[-1]))))
