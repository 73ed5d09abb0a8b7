"""What the Helm chart renders to is what Kubernetes takes, and holds what a server needs.

The schemas are those of Kubernetes' own API, strict: they refuse unknown fields. Of a
ServiceMonitor, which is not Kubernetes' own, the fields that the chart uses are checked against a
schema written here after the operator's reference. Nothing here ran in a cluster.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from integration.deploy.helm import CHART, NEEDS_HELM, ROOT, VALUES, rendered, run, the
from integration.deploy.service_monitor import SERVICE_MONITOR
from juice_server.process import CLOSING_S, LAST_WORDS_S
from juice_server.settings import Settings
from tests.support.page_blocks import agree, commands, run_by

pytestmark = NEEDS_HELM
PAGE = ROOT / "docs" / "how-to" / "kubernetes.md"
OPEN = ("--set", "keys.open=true")
MINI = ("--values", str(VALUES / "mini.yaml"), *OPEN)
TEN = ("--values", str(VALUES / "ten-replicas.yaml"))
SHARED = (*TEN, "--values", str(VALUES / "shared-gpu.yaml"))
SCALED = (*TEN, "--values", str(VALUES / "autoscaling.yaml"))
EVERYTHING = (
    *("--set-file", f"keys.file={VALUES / 'mini.yaml'}"),
    *("--set-json", 'headSets.configMaps=[{"name": "own", "path": "mini/own"}]'),
    *("--set", "engine=vllm,offline=true,gpu.count=2,hubToken.existingSecret=hub"),
    *("--set", "ingress.enabled=true,ingress.host=a.example,ingress.tlsSecret=tls"),
    *("--set", "serviceMonitor.enabled=true,serviceMonitor.labels.release=prometheus"),
    *("--set", "autoscaling.enabled=true,runtimeClassName=nvidia,priorityClassName=high"),
    *("--set", "modelCache.existingClaim=models,podAnnotations.a=b,podLabels.c=d"),
    *("--set", "ingress.className=nginx,service.annotations.e=f,nodeSelector.gpu=h100"),
    *("--set-json", 'extraEnv=[{"name": "A", "value": "b"}]'),
    *("--set-json", 'networkPolicy.egress=[{"ports": [{"port": 4317}]}]'),
    *("--set-json", 'imagePullSecrets=[{"name": "registry"}]'),
    *("--set-json", 'ingress.annotations={"a": "off"}'),
    *("--set-json", 'affinity={"nodeAffinity": {}}'),
)
CLAIMED = (*OPEN, "--set", "headSets.existingClaim=sets,modelCache.hostPath=/var/models")
CHOICES = {
    "mini": MINI,
    "ten replicas": TEN,
    "a shared GPU": SHARED,
    "autoscaling": SCALED,
    "everything": EVERYTHING,
    "a claim": CLAIMED,
    "defaults": OPEN,
}
# The oldest that the chart takes, one between, and the newest that is known.
VERSIONS = ("1.27", "1.32", kubernetes_validate.latest_version())


def check(manifest: dict[str, Any], version: str) -> None:
    """Raise ValidationError for a manifest that the API would refuse."""
    if manifest["kind"] == "ServiceMonitor":
        jsonschema.validate(manifest, SERVICE_MONITOR)
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


def pod_of(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    return the("Deployment", manifests)["spec"]["template"]["spec"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("choice", CHOICES)
def test_every_manifest_is_one_that_kubernetes_takes(choice: str, version: str) -> None:
    manifests = rendered(*CHOICES[choice], "--kube-version", version)
    assert {"Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget"} <= {
        manifest["kind"] for manifest in manifests
    }
    for manifest in manifests:
        check(manifest, version)


def test_everything_has_each_kind() -> None:
    assert sorted({manifest["kind"] for manifest in rendered(*EVERYTHING)}) == [
        "Deployment",
        "HorizontalPodAutoscaler",
        "Ingress",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Secret",
        "Service",
        "ServiceMonitor",
    ]


def test_the_schema_has_the_values_that_the_chart_has() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert set(schema) == {"global", *values}, "global is what a chart above this one may set"
    for name, each in schema.items():
        if "properties" in each and name != "resources":
            assert set(each["properties"]) == set(values[name]), name


def test_the_image_is_the_one_that_a_release_publishes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    repository = project["urls"]["Source"].removeprefix("https://github.com/")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "image.yml").read_text())
    job = workflow["jobs"]["image"]
    (name,) = [step["with"]["images"] for step in job["steps"] if step.get("id") == "names"]
    published = name.replace("${{ github.repository }}", repository)
    gpu, cpu = [
        f"{published}:{project['version']}{each['suffix']}"
        for each in job["strategy"]["matrix"]["include"]
    ]
    images = {
        choice: pod_of(rendered(*CHOICES[choice]))["containers"][0]["image"] for choice in CHOICES
    }
    assert images.pop("mini") == cpu
    assert set(images.values()) == {gpu}
    labels = the("Deployment", rendered(*OPEN))["metadata"]["labels"]
    assert labels["app.kubernetes.io/version"] == project["version"]
    assert labels["helm.sh/chart"] == f"juice-{project['version']}"
    page = PAGE.read_text()
    assert f"`{gpu}`" in page
    assert f"`{cpu.partition(':')[2]}`" in page


def test_what_ten_replicas_need_is_made_by_the_page() -> None:
    """Head sets of the model, keys and the hub's token: a pod waits for each that is missing."""
    values = yaml.safe_load((VALUES / "ten-replicas.yaml").read_text())
    page = PAGE.read_text()
    sets = values["headSets"]["configMaps"]
    assert {each["path"].split("/")[0] for each in sets} == {values["model"].replace("/", "--")}
    assert [each["path"].split("/")[1] for each in sets] == ["context", "parametric"]
    for item in sets:
        made = f"kubectl create configmap {item['name']} --from-file=head_sets/{item['path']}\n"
        assert made in page
    assert f"juice identify --model {values['model']} " in page
    keys, hub = values["keys"]["existingSecret"], values["hubToken"]["existingSecret"]
    assert f"kubectl create secret generic {keys} --from-file=keys.toml\n" in page
    assert f"kubectl create secret generic {hub} --from-literal=token=$HF_TOKEN\n" in page
    assert f"install -d -o 10001 -g 10001 {values['modelCache']['hostPath']}\n" in page
    (container,) = pod_of(rendered(*TEN))["containers"]
    assert "--head-sets=/head_sets" in container["args"]


def broken(kind: str, *path: str | int, to: Any) -> dict[str, Any]:
    manifest: Any = deepcopy(the(kind, rendered(*SCALED)))
    place = manifest
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return manifest


@pytest.mark.parametrize(
    ("kind", "path", "to"),
    [
        ("Deployment", ("spec", "replica"), 2),
        ("Deployment", ("spec", "strategy", "rollingUpdate", "maxSurge"), [1]),
        ("Deployment", ("spec", "template", "spec", "enableServiceLinks"), "no"),
        ("Deployment", ("spec", "template", "spec", "containers", 0, "livenesProbe"), {}),
        ("Deployment", ("spec", "template", "spec", "containers", 0, "args", 0), 8000),
        ("PodDisruptionBudget", ("spec", "unhealthyPodEvictionPolicy"), {}),
        ("NetworkPolicy", ("spec", "ingress", 0, "ports", 0, "protocoll"), "TCP"),
        ("HorizontalPodAutoscaler", ("spec", "metrics", 0, "pods", "metric"), "waiting"),
        ("ServiceMonitor", ("spec", "endpoints", 0, "port"), 8001),
        ("ServiceMonitor", ("spec", "endpoints", 0, "targetport"), "admin"),
    ],
)
def test_a_broken_manifest_is_refused(kind: str, path: tuple[str | int, ...], to: Any) -> None:
    """The control of the tests above."""
    with pytest.raises(jsonschema.ValidationError):
        check(broken(kind, *path, to=to), VERSIONS[-1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "0 of existingSecret, file and open are set"),
        ((*OPEN, "--set", "keys.existingSecret=s"), "2 of existingSecret, file and open are set"),
        ((*OPEN, "--set", "replicaz=2"), "'replicaz' not allowed"),
        ((*OPEN, "--set", "replicas=two"), "got string, want integer"),
        ((*OPEN, "--set", "flags.api-key=secret"), "api-key"),
        ((*OPEN, "--set", "port=80"), "minimum"),
        ((*CLAIMED, *EVERYTHING[2:4]), "existingClaim and configMaps are both set"),
    ],
)
def test_wrong_values_are_refused_with_the_reason(arguments: tuple[str, ...], message: str) -> None:
    done = run("template", "juice", str(CHART), *arguments)
    assert done.returncode != 0
    assert message in done.stderr


def test_the_page_shows_what_helm_refuses() -> None:
    file = "integration/deploy/test_chart.py::test_the_page_shows_what_helm_refuses"
    for block in run_by(PAGE, file):
        for command, shown in commands(block.text, prompt="$ "):
            _, *arguments = shlex.split(command)
            done = run(*arguments, folder=ROOT)
            assert agree(shown, done.stdout + done.stderr), done.stderr


def test_helm_finds_nothing_to_mend_in_the_chart() -> None:
    done = run("lint", "--strict", str(CHART), *OPEN)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("choice", CHOICES)
def test_a_pod_may_do_as_little_as_possible(choice: str) -> None:
    pod = pod_of(rendered(*CHOICES[choice]))
    (container,) = pod["containers"]
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    names = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == names
    assert ("shared-memory" in names) == ("--engine=vllm" in container["args"])


@pytest.mark.parametrize(("lame_duck", "drain"), [(0, 0), (15, 300), (60, 3600)])
def test_the_grace_period_is_longer_than_the_server_takes_to_end_whatever_hangs(
    lame_duck: int, drain: int
) -> None:
    times = f"lameDuckSeconds={lame_duck},drainSeconds={drain}"
    pod = pod_of(rendered(*OPEN, "--set", times))
    (container,) = pod["containers"]
    assert f"--lame-duck={lame_duck}" in container["args"]
    assert f"--drain={drain}" in container["args"]
    longest = lame_duck + drain + LAST_WORDS_S + CLOSING_S
    assert longest < pod["terminationGracePeriodSeconds"] <= longest + 10


def test_by_default_an_upgrade_cuts_no_request_and_takes_nothing_away_first() -> None:
    deployment = the("Deployment", rendered(*OPEN))
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    drain = next(
        float(arg.removeprefix("--drain="))
        for arg in pod_of([deployment])["containers"][0]["args"]
        if arg.startswith("--drain=")
    )
    assert drain >= Settings.model_fields["request_timeout"].default


def test_probes_and_metrics_are_on_the_admin_port_which_clients_cannot_reach() -> None:
    manifests = rendered(*SCALED)
    (container,) = pod_of(manifests)["containers"]
    assert {container[f"{name}Probe"]["httpGet"]["port"] for name in ("startup", "liveness")} == {
        "admin"
    }
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "admin"}
    service, replicas = (manifest for manifest in manifests if manifest["kind"] == "Service")
    assert [port["name"] for port in service["spec"]["ports"]] == ["http"]
    assert replicas["spec"]["clusterIP"] == "None"
    monitor = the("ServiceMonitor", manifests)
    assert monitor["spec"]["endpoints"][0]["port"] == "admin"
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert [
        wanted.items() <= each["metadata"]["labels"].items() for each in (service, replicas)
    ] == [
        False,
        True,
    ]
    rules = the("NetworkPolicy", manifests)["spec"]["ingress"]
    admitted = {port["port"]: rule["from"] for rule in rules for port in rule["ports"]}
    assert admitted["admin"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ]


def test_what_selects_pods_selects_these() -> None:
    manifests = rendered(*EVERYTHING)
    labels = the("Deployment", manifests)["spec"]["template"]["metadata"]["labels"].items()
    selectors = [
        the("Deployment", manifests)["spec"]["selector"]["matchLabels"],
        the("PodDisruptionBudget", manifests)["spec"]["selector"]["matchLabels"],
        the("NetworkPolicy", manifests)["spec"]["podSelector"]["matchLabels"],
        *(manifest["spec"]["selector"] for manifest in manifests if manifest["kind"] == "Service"),
        *(
            topologyspreadconstraint["labelSelector"]["matchLabels"]
            for topologyspreadconstraint in pod_of(manifests)["topologySpreadConstraints"]
        ),
    ]
    assert len(selectors) == 6
    assert all(selector and selector.items() <= labels for selector in selectors)
    names = {manifest["metadata"]["name"] for manifest in rendered(*OPEN, release="blue")}
    assert names == {"blue-juice", "blue-juice-replicas"}, "two releases may share a namespace"


def test_offline_replicas_reach_nothing_but_names() -> None:
    egress = the("NetworkPolicy", rendered(*MINI))["spec"]["egress"]
    assert [port["port"] for rule in egress for port in rule["ports"]] == [53, 53]
    (container,) = pod_of(rendered(*MINI))["containers"]
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in container["env"]


def test_flags_keep_their_numbers_and_lists_repeat_theirs(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(
        "flags: {max-prompt-characters: 1000000, engine-timeout: 0.5, log-prompts: true,"
        " allow-approximate: false, vllm-arg: [a=1, b=c d]}\n"
    )
    args = pod_of(rendered(*OPEN, "--values", str(values)))["containers"][0]["args"]
    assert args[-5:] == [
        "--engine-timeout=0.5",
        "--log-prompts",
        "--max-prompt-characters=1000000",
        "--vllm-arg=a=1",
        "--vllm-arg=b=c d",
    ]


def test_the_autoscaler_and_the_adapter_read_the_metric_that_the_server_has() -> None:
    name = "juice_requests_waiting"
    scaler = the("HorizontalPodAutoscaler", rendered(*SCALED))
    assert scaler["spec"]["metrics"][0]["pods"]["metric"]["name"] == name
    assert "replicas" not in the("Deployment", rendered(*SCALED))["spec"], "or each upgrade resets"
    (rule,) = yaml.safe_load((CHART.parent / "prometheus-adapter.yaml").read_text())["rules"][
        "custom"
    ]
    assert rule["name"]["as"] == name
    assert rule["seriesQuery"].startswith(f"{name}{{")
    assert f"| `{name}` |" in (CHART.parents[2] / "docs/reference/metrics.md").read_text()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is Prometheus' own tool")
def test_the_adapters_query_gives_each_pod_what_waited_in_the_last_minute(tmp_path: Path) -> None:
    (rule,) = yaml.safe_load((CHART.parent / "prometheus-adapter.yaml").read_text())["rules"][
        "custom"
    ]
    query = (
        rule["metricsQuery"]
        .replace("<<.Series>>", "juice_requests_waiting")
        .replace("<<.LabelMatchers>>", 'namespace="serving",pod=~"a|b"')
        .replace("<<.GroupBy>>", "pod")
    )
    series = 'juice_requests_waiting{namespace="%s", pod="%s"}'
    cases = [("serving", "a", "8x8"), ("serving", "b", "0 0 0 0 4 4 4 4 4"), ("other", "a", "9x8")]
    expected = [("a", 8), ("b", 4)]
    tests = {
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [
                    {"series": series % (space, pod), "values": values}
                    for space, pod, values in cases
                ],
                "promql_expr_test": [
                    {
                        "expr": query,
                        "eval_time": "2m",
                        "exp_samples": [
                            {"labels": f'{{pod="{pod}"}}', "value": value}
                            for pod, value in expected
                        ],
                    }
                ],
            }
        ],
    }
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "tests.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
