"""Head sets on the hub: pulled into its cache, and pushed with a card as their README.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    ModelCardData,
    errors,
    snapshot_download,
)

from juice.errors import HeadSetNotFoundError, OutputError, causes_of, first_line
from juice.formula import METHODS
from juice.head_set.schema import Content
from juice.head_set.storage import JSON_FILE, is_scores_name

PAPER = "https://proceedings.mlr.press/v267/li25c.html"
NOUNS = {"attribution": "attribution", "learned": "learning", "probe": "probes"}
WINS = {"context": "what it reads in the prompt", "parametric": "what it remembers"}
CARD = """---
{data}
---

# {own.name}: {model.id} toward {own.target}

A head set for [JuICE](https://github.com/juice-steering/juice): it steers `{model.id}`, at \
inference time and without training, so that in a conflict {wins} wins. Method: \
[Taming Knowledge Conflicts in Language Models]({paper}).

## Heads

Layer and query head, both counted from 0, best first.

| | |
|---|---|
| model | {model.architecture}, {model.n_layers} layers of {model.n_heads} heads |
| revision | {revision} |
| fingerprint | {fingerprint} |
| default method | {own.method} |
{heads}

## How the heads were found

{origin}
{effect}
## Use

```python
from juice import HeadSet, Steer, load
model, head_set = load("{model.id}"), HeadSet.from_pretrained("{repo_id}")
print(model.generate("...", steer=Steer(target="{own.target}", head_set=head_set{options}))[0])
```

```sh
juice pull {repo_id} --out head_sets && juice serve --model {model.id} --head-sets head_sets
curl -s http://127.0.0.1:8000/generate -H 'content-type: application/json' -d '{body}'
```
"""


def card_of(head_set: Content, repo_id: str) -> str:
    """Return a head set's card as Markdown, with the hub's metadata before it."""
    model, target = head_set.model, head_set.target
    data = ModelCardData(
        library_name="juice",
        base_model=model.id if "/" in model.id else None,  # a path has lost its folders
        tags=["head-set", "steering", "knowledge-conflicts", target],
    )
    is_tuned = head_set.methods.given[head_set.method].betas is not None
    steer = {"target": target, "head_set": head_set.name}
    betas = {} if is_tuned else {"beta_plus": 1.0, "beta_minus": -1.0}
    unknown = "none: matched by architecture and shape"
    text = CARD.format(
        data=data,
        own=head_set,
        model=model,
        wins=WINS[target],
        paper=PAPER,
        revision=model.revision or "not recorded",
        fingerprint=f"`{model.fingerprint}`" if model.fingerprint else unknown,
        heads="\n".join(_heads(head_set)),
        origin=_origin(head_set),
        effect=_effect(head_set),
        repo_id=repo_id,
        options="".join(f", {field}={value}" for field, value in betas.items()),
        body=json.dumps({"prompt": "...", "steer": {**steer, **betas}}),
    )
    return str(ModelCard(text))


def _heads(head_set: Content) -> Iterator[str]:
    for method, given in head_set.methods.given.items():
        for sign, heads in (("+", given.heads.plus), ("-", given.heads.minus)):
            yield f"| {sign} heads, {method} | {' '.join(map(str, heads)) or 'none'} |"
        yield f"| betas, {method} | {given.betas or 'untuned: give them, or run `juice tune`'} |"


def _origin(head_set: Content) -> str:
    lines = [f"Source: {head_set.source}"] if head_set.source else []
    if found := head_set.identification:
        alphas = " ".join(f"{alpha:g}" for alpha in (*found.alphas_plus, *found.alphas_minus))
        how = f"probes scaled by {alphas}" if alphas else NOUNS[found.method]
        kept = f", the best {found.top_k} of each sign kept" if found.top_k else ""
        versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
        lines.append(
            f"Identified by {how} on {found.n_examples} examples (seed {found.seed}) under "
            f"the conflict types {', '.join(found.conflict_types)}{kept} ({versions})."
        )
    return "\n\n".join(lines) or "Made by hand."


def _effect(head_set: Content) -> str:
    measured = {m: v for m in METHODS if (v := head_set.validation(m)) is not None}
    if not measured:
        return ""
    rows = [
        f"| {method} | {kind} | {one.accuracy_unsteered[kind]:.3f} | {value:.3f} | "
        f"{one.n_examples} |"
        for method, one in measured.items()
        for kind, value in one.accuracy.items()
    ]
    for method, one in measured.items():
        if one.left_alone:
            rows += ["", f"Right answers where {method} should change nothing: {one.left_alone}."]
        if one.harm:
            rows += ["", f"What {method} does to ordinary text, without a gate:", ""]
            rows += [f"- strength {strength}: {harm}" for strength, harm in one.harm.items()]
    for method, given in head_set.methods.given.items():
        if given.gate:
            rows += ["", f"Gate of {method}, used where a request asks for `gate: auto`:", ""]
            rows += [f"- {rule}" for rule in given.gate.rules]
    head = ["| method | conflict type | unsteered | steered | facts |", "|---|---|---|---|---|"]
    summary = (
        f"Share of {head_set.target} answers on the examples that tuned the betas; "
        "expect less on others."
    )
    return "\n".join(["", "## What it did on validation", "", summary, "", *head, *rows, ""])


def pull(
    repo_id: str,
    *,
    revision: str | None,
    subfolder: str | None,
    token: str | bool | None,
    force_download: bool,
) -> Path:
    """Return the folder in the hub's cache with the files of a head set, all of one commit.

    The options are those of `HeadSet.from_pretrained`. Raises HeadSetNotFoundError.
    """
    place = f"{subfolder.strip('/')}/" if subfolder else ""
    try:
        snapshot = snapshot_download(
            repo_id,
            revision=revision,
            token=token,
            force_download=force_download,
            allow_patterns=[place + JSON_FILE, place + "scores*.safetensors"],
        )
    except Exception as error:  # whatever the network, the hub or a damaged cache raises
        raise HeadSetNotFoundError(
            f"cannot pull the head set {repo_id}: {_explain(error, repo_id, revision)}"
        ) from error
    folder = Path(snapshot) / place
    if not (folder / JSON_FILE).exists():
        at = f" at {revision}" if revision else ""
        raise HeadSetNotFoundError(
            f"the repository {repo_id}{at} has no {place}{JSON_FILE}: there is no head set there; "
            "give the folder of one as subfolder"
        )
    return folder


def push(
    head_set: Content,
    files: Mapping[str, bytes],
    repo_id: str,
    *,
    private: bool | None,
    token: str | bool | None,
    revision: str | None,
    commit_message: str,
    create_pr: bool,
) -> str:
    """Commit a head set's files and card to a repository, and return the commit's URL.

    Scores of an earlier set are removed in the same commit. The options are those of
    `HeadSet.push_to_hub`. Raises OutputError.
    """
    api = HfApi(token=token)
    try:
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        named = {**files, "README.md": card_of(head_set, repo).encode()}
        stale = [
            name
            for name in api.list_repo_files(repo, revision=revision)
            if is_scores_name(name) and name not in named
        ]
        commit = api.create_commit(
            repo,
            [
                *(CommitOperationAdd(name, data) for name, data in named.items()),
                *(CommitOperationDelete(name) for name in stale),
            ],
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )
    except Exception as error:  # as above
        raise OutputError(
            f"cannot push the head set to {repo_id}: {_explain(error, repo_id, revision)}"
        ) from error
    return str(commit.pr_url or commit.commit_url)


def _explain(error: Exception, repo_id: str, revision: str | None) -> str:
    """Return the error of the hub's client in one line, and the remedy."""
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
