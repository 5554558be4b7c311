//! Credentials and settings from `~/.aws`, as the AWS tools keep them.

use std::{collections::HashMap, env, fs, path::PathBuf, sync::Arc};

use async_trait::async_trait;
use object_store::{CredentialProvider, aws::AwsCredential};
use parking_lot::Mutex;

/// What a profile says, without values that are empty: `region`, for example.
pub(super) type Profile = HashMap<String, String>;

fn credential(profile: &Profile) -> Option<AwsCredential> {
    Some(AwsCredential {
        key_id: profile.get("aws_access_key_id")?.clone(),
        secret_key: profile.get("aws_secret_access_key")?.clone(),
        token: profile.get("aws_session_token").cloned(),
    })
}

/// The files of profiles: settings, then credentials.
fn files() -> [Option<PathBuf>; 2] {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = |name: &str| Some(variable("HOME")?.join(".aws").join(name));
    [
        variable("AWS_CONFIG_FILE").or_else(|| home("config")),
        variable("AWS_SHARED_CREDENTIALS_FILE").or_else(|| home("credentials")),
    ]
}

/// The profile that `AWS_PROFILE` names, or `default`.
pub(super) fn load() -> Profile {
    let name = env::var("AWS_PROFILE").ok().filter(|name| !name.is_empty()).unwrap_or_else(|| "default".to_owned());
    let mut values = HashMap::new();
    for path in files().into_iter().flatten() {
        values.extend(section(&fs::read_to_string(path).unwrap_or_default(), &name));
    }
    values.retain(|_, value| !value.is_empty());
    values
}

/// The values of a profile in a file. The file of settings writes `[profile name]`, that of credentials `[name]`.
fn section(text: &str, name: &str) -> Profile {
    let mut inside = false;
    let mut values = HashMap::new();
    for line in text.lines() {
        if let Some(title) = line.trim().strip_prefix('[').and_then(|line| line.split(']').next()) {
            let title = title.trim();
            inside = title == name || title.strip_prefix("profile").is_some_and(|rest| rest.trim() == name);
        } else if inside
            // Indented lines belong to a nested section.
            && !line.starts_with([' ', '\t', '#', ';'])
            && let Some((key, value)) = line.split_once('=')
        {
            values.insert(key.trim().to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    values
}

/// The keys of the profile. They are read for each request, as tools renew them: two small files, which the page cache has.
#[derive(Debug)]
pub(super) struct ProfileProvider(Mutex<Arc<AwsCredential>>);

impl ProfileProvider {
    /// A provider, if the profile has keys.
    pub(super) fn of(profile: &Profile) -> Option<Self> {
        Some(Self(Mutex::new(Arc::new(credential(profile)?))))
    }
}

#[async_trait]
impl CredentialProvider for ProfileProvider {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let read = credential(&load());
        let mut known = self.0.lock();
        // Those of a file that is being written stay for a moment.
        if let Some(credential) = read {
            *known = Arc::new(credential);
        }
        Ok(Arc::clone(&known))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_are_found_in_both_files() {
        let text = "[default]\naws_access_key_id = A\naws_secret_access_key=S\n# x=y\n[profile two]\nregion = eu\n\
                    s3 =\n  max = 3\n[two]\nAWS_SESSION_TOKEN=T=\n";
        let two = section(text, "two");
        let found = ["region", "aws_session_token", "max"].map(|key| two.get(key).map(String::as_str));
        assert_eq!(found, [Some("eu"), Some("T="), None]);
        assert!(ProfileProvider::of(&two).is_none());
        let first = section(text, "default");
        assert_eq!(credential(&first).unwrap().key_id, "A");
        assert!(!format!("{:?}", ProfileProvider::of(&first)).contains("\"S\""));
    }
}
