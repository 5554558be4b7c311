"""Lints a chart by Helm's own library, and writes what it makes of some values as manifests, for a checker of manifests.

    python tests/static/chart.py CHART DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from helm_python import chart as helm
from helm_python.errors import HelmValuesError

# Every branch of the templates is taken by one of these.
VALUES = {
    "node": {},
    "node-bare": {
        "credentials": "keys", "models": {"hostPath": ""},
        "node": {"cachePath": "", "maxPagesLimit": 0, "readAheadKib": 0, "metrics": False, "allowOther": False,
                 "nodeSelector": {"gpu": "h100"}, "tolerations": [{"operator": "Exists"}]},
    },
    "csi": {"mode": "csi", "credentials": "keys"},
    "csi-bare": {
        "mode": "csi", "models": {"hostPath": ""},
        "csi": {"cachePath": "", "nodeSelector": {"gpu": "h100"}, "tolerations": [{"operator": "Exists"}]},
    },
    "serve": {"mode": "serve", "credentials": "keys", "serve": {"name": "org/llama", "podMonitor": True, "networkPolicy": True}},
    "serve-open": {"mode": "serve", "models": {"claim": ""}, "serve": {
        "tokenSecret": "", "s3": False, "replicas": 1, "podMonitor": True, "networkPolicy": True,
        "clients": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}],
    }},
}  # fmt: skip


def main() -> None:
    path, out = sys.argv[1], Path(sys.argv[2])
    with helm.Chart.load(path) as chart:
        for name, values in VALUES.items():
            report = helm.lint(path, values, strict=True)
            # Severity 1 is information: the chart has no icon.
            findings = [found for found in report["messages"] if found["severity"] > 1] + report["errors"]
            if findings:
                sys.exit(f"{path}, {name}: {json.dumps(findings)}")
            rendered = chart.render(values=values, name=name, namespace="ckfs")
            manifests = {file: text for file, text in rendered.items() if file.endswith(".yaml") and text.strip()}
            # Kinds that are not Kubernetes' own have schemas here.
            others = [manifests.pop(file) for file in [*manifests] if file.endswith("podmonitor.yaml")]
            (out / f"{name}.yaml").write_text("\n---\n".join(manifests.values()))
            for text in others:
                (out / f"{name}.podmonitor").write_text(text)
        for wrong in ({"mode": "other"}, {"csi": {"driver": "Upper"}}, {"node": {"hostPath": "relative"}}, {"nodes": {}}):
            try:
                chart.validate_schema(chart.merge_values(wrong))
            except HelmValuesError:
                continue
            sys.exit(f"{path}: values are accepted: {wrong}")


if __name__ == "__main__":
    main()
