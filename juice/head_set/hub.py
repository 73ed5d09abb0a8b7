"""Head sets on the hub: pulled into the folder of head sets, pushed with a card.

A card is the README.md of a pushed set: what it is, how it was found and what it did, from its
file alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
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
from juice.formula import Method, Target
from juice.head_set.schema import (
    Identification,
    Methods,
    ModelIdentity,
    Validation,
)
from juice.head_set.storage import JSON_FILE, is_scores_name

PAPER = "https://proceedings.mlr.press/v267/li25c.html"
NOUNS = {"attribution": "attribution", "learned": "learning", "probe": "probes"}
WINS = {"context": "what it reads in the prompt", "parametric": "what it remembers"}
CARD = """---
{data}
---

# {name}: {model.id} toward {target}

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
| default method | {method} |
{heads}

## How the heads were found

{origin}
{effect}
## Use

```python
from juice import HeadSet, Steer, load
model, head_set = load("{model.id}"), HeadSet.from_pretrained("{repo_id}")
print(model.generate("...", steer=Steer(target="{target}", head_set=head_set{options}))[0])
```

```sh
juice pull {repo_id} --out head_sets && juice serve --model {model.id} --head-sets head_sets
curl -s http://127.0.0.1:8000/generate -H 'content-type: application/json' -d '{body}'
```
"""


def card_of(
    repo_id: str,
    *,
    name: str,
    target: Target,
    source: str | None,
    model: ModelIdentity,
    method: Method,
    methods: Methods,
    identification: Identification | None,
    validations: Mapping[Method, Validation],
) -> str:
    """Return the card as Markdown, with the hub's metadata before it.

    Args:
        repo_id: The repository that the card names.
        name: The head set's name.
        target: The target that it steers toward.
        source: The publication of its heads.
        model: The model that it is for.
        method: The method that serves by default.
        methods: The heads, betas and gates.
        identification: The way in which the heads were found.
        validations: The effect of the betas on their validation examples, by method.
    """
    is_hub_id = "/" in model.id and not model.id.startswith((".", "/", "~"))
    data = ModelCardData(
        library_name="juice",
        base_model=model.id if is_hub_id else None,
        tags=["head-set", "steering", "knowledge-conflicts", target],
    )
    is_tuned = methods.given[method].betas is not None
    betas = {} if is_tuned else {"beta_plus": 1.0, "beta_minus": -1.0}
    unknown = "none: matched by architecture and shape"
    text = CARD.format(
        data=data,
        name=name,
        model=model,
        target=target,
        wins=WINS[target],
        paper=PAPER,
        revision=model.revision or "not recorded",
        fingerprint=f"`{model.fingerprint}`" if model.fingerprint else unknown,
        method=method,
        heads="\n".join(_heads(methods)),
        origin=_origin(source, identification),
        effect=_effect(target, methods, validations),
        repo_id=repo_id,
        options="".join(f", {field}={value}" for field, value in betas.items()),
        body=json.dumps({"prompt": "...", "steer": {"target": target, "head_set": name, **betas}}),
    )
    return str(ModelCard(text))


def _heads(methods: Methods) -> Iterator[str]:
    for method, given in methods.given.items():
        for sign, heads in (("+", given.heads.plus), ("-", given.heads.minus)):
            yield f"| {sign} heads, {method} | {' '.join(map(str, heads)) or 'none'} |"
        yield f"| betas, {method} | {given.betas or 'untuned: give them, or run `juice tune`'} |"


def _origin(source: str | None, identification: Identification | None) -> str:
    lines = []
    if source:
        lines.append(f"Source: {source}")
    if identification:
        n_examples, seed = identification.n_examples, identification.seed
        alphas = " ".join(
            f"{alpha:g}" for alpha in (*identification.alphas_plus, *identification.alphas_minus)
        )
        how = f"probes scaled by {alphas}" if alphas else NOUNS[identification.method]
        kept = (
            f", the best {identification.top_k} of each sign kept" if identification.top_k else ""
        )
        versions = ", ".join(
            f"{name} {version}" for name, version in identification.versions.items()
        )
        lines.append(
            f"Identified by {how} on {n_examples} examples (seed {seed}) under "
            f"the conflict types {', '.join(identification.conflict_types)}{kept} ({versions})."
        )
    return "\n\n".join(lines) or "Made by hand."


def _effect(target: Target, methods: Methods, validations: Mapping[Method, Validation]) -> str:
    if not validations:
        return ""
    rows = [
        f"| {method} | {kind} | {measured.accuracy_unsteered[kind]:.3f} | {value:.3f} | "
        f"{measured.n_examples} |"
        for method, measured in validations.items()
        for kind, value in measured.accuracy.items()
    ]
    for method, given in methods.given.items():
        if given.gate:
            rows += ["", f"Gate of {method}, used where a request asks for `gate: auto`:", ""]
            rows += [f"- {rule}" for rule in given.gate.rules]
    head = ["| method | conflict type | unsteered | steered | facts |", "|---|---|---|---|---|"]
    summary = (
        f"Share of {target} answers on the examples that tuned the betas; expect less on others."
    )
    return "\n".join(["", "## What it did on validation", "", summary, "", *head, *rows, ""])


CARD_FILE = "README.md"


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
    files: Mapping[str, bytes],
    card: Callable[[str], str],
    repo_id: str,
    *,
    private: bool | None,
    token: str | bool | None,
    commit_message: str,
    revision: str | None,
    create_pr: bool,
) -> str:
    """Commit the files of a head set and its card to a repository, and return the commit's URL.

    Scores of an earlier set are removed in the same commit. `card` makes the model card for the
    repository's full name; the options are those of `HeadSet.push_to_hub`. Raises OutputError.
    """
    api = HfApi(token=token)
    try:
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        named = {**files, CARD_FILE: card(repo).encode()}
        existing = api.list_repo_files(repo, revision=revision)
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(path_in_repo=name, path_or_fileobj=data)
            for name, data in named.items()
        ]
        operations += [
            CommitOperationDelete(path_in_repo=name)
            for name in existing
            if is_scores_name(name) and name not in named
        ]
        commit = api.create_commit(
            repo,
            operations,
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
