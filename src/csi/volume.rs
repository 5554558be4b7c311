//! What a volume asks for: its attributes as a configuration, its secrets as variables of its daemon.

use std::{
    collections::{BTreeMap, HashMap},
    path::{Component, Path},
};

use ckfs_config::{Config, ConfigError, Setting, options};
use ckfs_source::digest::hexadecimal;
use sha2::{Digest, Sha256};
use tonic::Status;

use crate::CsiOptions;

/// Variables that secrets may set. None of them names a file: a daemon reads more files than a user of volumes may.
const VARIABLES: [&str; 18] = [
    "HF_TOKEN",
    "HF_ENDPOINT",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_TOKEN",
    "AZURE_CLIENT_ID",
    "AZURE_CLIENT_SECRET",
    "AZURE_TENANT_ID",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
];

/// Variables of the plugin that no daemon with secrets of its own inherits: they would go with the endpoint that those name.
pub(crate) fn is_credential(name: &str) -> bool {
    ["HF_", "AWS_", "AZURE_", "GOOGLE_"].iter().any(|family| name.starts_with(family))
}

/// What one daemon serves.
pub(crate) struct WantedVolume {
    /// The same for volumes that may share a daemon.
    pub(crate) key: String,
    pub(crate) config: Config,
    /// Never shown or written.
    pub(crate) variables: BTreeMap<String, String>,
}

impl WantedVolume {
    /// By attributes and secrets.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`, or `NOT_FOUND` for a file that is not there.
    pub(crate) fn new(
        options: &CsiOptions,
        attributes: &HashMap<String, String>,
        secrets: &HashMap<String, String>,
    ) -> Result<Self, Status> {
        // What the kubelet says of the pod, and a provisioner of itself.
        let is_ours = |name: &str| !name.contains("k8s.io/") && !name.contains("kubernetes.io/");
        let pairs: BTreeMap<&str, &str> = attributes
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .filter(|(name, _)| is_ours(name))
            .collect();
        let settings = options::of_attributes(pairs, |row, word| check_paths(&options.roots, row, word))
            .map_err(Status::invalid_argument)?;
        let mut config =
            Config::gather(&[&settings], &options.state.join("volumes")).map_err(|error| match &error {
                ConfigError::Read { .. } => Status::not_found(error.to_string()),
                ConfigError::Text { .. } | ConfigError::Unwritable { .. } => {
                    Status::invalid_argument(error.to_string())
                }
            })?;
        if config.source.is_none() {
            return Err(Status::invalid_argument("attribute source: expected a directory, org/name, hf://, s3:// ..."));
        }
        config.mount.allow_other = Some(true);
        config.mount.keeper = config.mount.steps.is_none().then_some(true);
        config.mount.cache_dir.clone_from(&options.cache_dir);
        let text = config.to_toml().map_err(|error| Status::invalid_argument(error.to_string()))?;
        let variables = variables(secrets)?;
        let mut hash = Sha256::new();
        for part in [&text].into_iter().chain(variables.iter().flat_map(|(name, value)| [name, value])) {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Ok(Self { key: short_digest(hash), config, variables })
    }
}

/// A name of 24 digits.
pub(crate) fn short_digest(hash: Sha256) -> String {
    hexadecimal(&hash.finalize()[..12])
}

/// The variables of a daemon. A value is in no message.
fn variables(secrets: &HashMap<String, String>) -> Result<BTreeMap<String, String>, Status> {
    let variable = |(name, value): (&String, &String)| {
        let known = if name.eq_ignore_ascii_case("token") { "HF_TOKEN" } else { name };
        if !VARIABLES.contains(&known) {
            let names = VARIABLES.join(", ");
            return Err(Status::invalid_argument(format!(
                "unknown key {name:?} of a secret; there are: token, {names}"
            )));
        }
        if value.contains('\0') {
            return Err(Status::invalid_argument(format!("key {name:?} of a secret: has a NUL")));
        }
        Ok((known.to_owned(), value.trim_end_matches('\n').to_owned()))
    };
    secrets.iter().map(variable).collect()
}

/// Refuses a value that names a file outside the directories that volumes may use.
fn check_paths(roots: &[impl AsRef<Path>], row: &Setting, word: &str) -> Result<(), String> {
    if roots.is_empty() || !options::names_paths(row) {
        return Ok(());
    }
    for part in word.split([',', '=', '*', ' ']) {
        let path = match part.split_once("://") {
            Some(("file", path)) => Path::new(path),
            Some(_) => continue,
            None => Path::new(part),
        };
        let is_name = path.is_relative() && path.components().all(|part| matches!(part, Component::Normal(_)));
        let is_plain = path.components().all(|part| !matches!(part, Component::ParentDir));
        let is_inside = |path: &Path| roots.iter().any(|root| path.starts_with(root));
        // A link inside may lead outside.
        let leads_inside = || path.canonicalize().map_or(true, |path| is_inside(&path));
        if !(is_name || path.is_absolute() && is_plain && is_inside(path) && leads_inside()) {
            let roots: Vec<String> = roots.iter().map(|root| root.as_ref().display().to_string()).collect();
            return Err(format!("a path must be below {}", roots.join(" or ")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(attributes: &[(&str, &str)], secrets: &[(&str, &str)]) -> Result<WantedVolume, Status> {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        std::os::unix::fs::symlink("/etc", root.join("out")).unwrap();
        let map = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(a, b)| ((*a).to_owned(), b.replace("ROOT", root.to_str().unwrap()))).collect()
        };
        let options = CsiOptions {
            endpoint: String::new(),
            node: String::new(),
            driver: String::new(),
            state: "/".into(),
            roots: vec![root.clone()],
            cache_dir: None,
            mounter: None,
        };
        WantedVolume::new(&options, &map(attributes), &map(secrets))
    }

    #[test]
    fn a_daemon_is_shared_by_equal_attributes_and_secrets_only() {
        let key = |attributes: &[(&str, &str)], secrets: &[(&str, &str)]| wanted(attributes, secrets).unwrap().key;
        let base = [("source", "org/name"), ("mesh", "fsdp=2")];
        let pod = ("csi.storage.k8s.io/ephemeral", "true");
        assert_eq!(key(&base, &[]), key(&[base[1], pod, base[0]], &[]));
        let token = ("token", "a");
        assert_ne!(key(&base, &[]), key(&base, &[token]));
        assert_ne!(key(&base, &[token]), key(&base, &[("token", "b")]));
        assert_eq!(key(&base, &[token]), key(&base, &[("HF_TOKEN", "a\n")]));
        assert_ne!(key(&base, &[]), key(&base[..1], &[]));
    }

    #[test]
    fn what_a_volume_may_not_ask_for_is_refused() {
        for (attributes, secrets, reason) in [
            (&[("mesh", "fsdp=2")][..], &[][..], "attribute source: expected"),
            (&[("sorce", "a/b")], &[], "did you mean `source`"),
            (&[("source", "a/b"), ("on_step", "id")], &[], "the node decides it"),
            (&[("source", "/etc")], &[], "a path must be below"),
            (&[("source", "ROOT/../etc")], &[], "a path must be below"),
            (&[("source", "../etc")], &[], "a path must be below"),
            (&[("source", "file:///etc")], &[], "a path must be below"),
            (&[("source", "ROOT/out")], &[], "a path must be below"),
            (&[("source", "a/b"), ("layout", "/x.toml")], &[], "a path must be below"),
            (&[("source", "a/b")], &[("LD_PRELOAD", "hidden")], "unknown key \"LD_PRELOAD\""),
            (&[("source", "a/b")], &[("HF_TOKEN_PATH", "hidden")], "unknown key \"HF_TOKEN_PATH\""),
        ] {
            let Err(status) = wanted(attributes, secrets) else { panic!("{attributes:?}") };
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            assert!(status.message().contains(reason) && !status.message().contains("hidden"), "{status:?}");
        }
        for source in ["ROOT/model", "s3://bucket/x", "org/name@main", "hf://org/name"] {
            assert!(wanted(&[("source", source), ("include", "/x/")], &[]).is_ok(), "{source}");
        }
    }
}
