#!/usr/bin/env bash
# Checks the files that other programs read, as far as that is possible without those programs: manifests by the schemas of
# Kubernetes, workflows by the schema of GitHub, the Dockerfile and all shell scripts by linters.
#
# Not done here: no image is built, no cluster and no Slurm runs.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
bin=$(tests/static/setup.sh)/bin

for manifest in examples/kubernetes/*.yaml; do
    # The one for Prometheus is no object of Kubernetes.
    [[ $manifest == */prometheus.yaml ]] || "$bin/kubernetes-validate" --strict "$manifest"
done
"$bin/check-jsonschema" --builtin-schema vendor.github-workflows .github/workflows/*.yml
"$bin/hadolint" examples/container/Dockerfile

mapfile -t scripts < <(grep -rlIx '#!/usr/bin/env bash' .ci examples tests)
"$bin/shellcheck" --severity=warning "${scripts[@]}"
echo "checked: examples/kubernetes, .github/workflows, the Dockerfile, ${#scripts[@]} scripts"
