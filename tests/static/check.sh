#!/usr/bin/env bash
# Checks the files that other programs read, as far as that is possible without those programs: manifests by the schemas of
# Kubernetes, a chart by Helm, workflows and forms of issues by the schemas of GitHub, the Dockerfile and all shell scripts by linters.
#
# Not done here: no image is built, no cluster and no Slurm runs.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
bin=$(tests/static/setup.sh)/bin

for manifest in examples/kubernetes/*.yaml; do
    case $manifest in
        # No object of Kubernetes.
        */prometheus.yaml) ;;
        # Kinds of others: by what is used of them here.
        */csi-jobset.yaml) "$bin/check-jsonschema" --schemafile tests/static/schemas/jobset.json "$manifest" ;;
        */csi-kserve.yaml) "$bin/check-jsonschema" --schemafile tests/static/schemas/inferenceservice.json "$manifest" ;;
        *) "$bin/kubernetes-validate" --strict "$manifest" ;;
    esac
done
# The chart: linted, and what it makes of several values checked as the manifests are.
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
"$bin/python" tests/static/chart.py examples/helm/ckfs "$made"
for manifest in "$made"/*.yaml; do
    "$bin/kubernetes-validate" --strict "$manifest"
done
for monitor in "$made"/*.podmonitor; do
    "$bin/check-jsonschema" --schemafile tests/static/schemas/podmonitor.json --default-filetype yaml "$monitor"
done
"$bin/check-jsonschema" --builtin-schema vendor.github-workflows .github/workflows/*.yml
for form in .github/ISSUE_TEMPLATE/*.yml; do
    case $form in
        */config.yml) schema=vendor.github-issue-config ;;
        *) schema=vendor.github-issue-forms ;;
    esac
    "$bin/check-jsonschema" --builtin-schema "$schema" "$form"
done
"$bin/hadolint" examples/container/Dockerfile

mapfile -t scripts < <(grep -rlIx '#!/usr/bin/env bash' .ci examples tests)
"$bin/shellcheck" --external-sources --severity=warning "${scripts[@]}"

# One build of the dependencies serves the program, its tests and its benches: none of them asks for features that the others lack.
features() {
    cargo tree --locked --workspace --edges "$1" --prefix none --format '{p} {f}' | sed 's/ (\*)$//' | sort -u
}
twice=$(comm -23 <(features normal,build,no-proc-macro) <(features normal,build,dev,no-proc-macro))
if [[ $twice ]]; then
    echo "tests build these crates again, with more features:"$'\n'"$twice" >&2
    exit 1
fi
echo "checked: examples/kubernetes, examples/helm, .github, the Dockerfile, ${#scripts[@]} scripts, features of dependencies"
