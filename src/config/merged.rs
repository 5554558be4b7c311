//! The configuration of a mount: settings of all forms together.

use std::path::PathBuf;

use super::{
    TimeLimit,
    file::FileSettings,
    settings::{MountSettings, ServeSettings, Settings, ViewSettings},
};

/// One view of the configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ViewConfig {
    /// Name of its directory; empty for the only view, at the root of the mount.
    pub name: String,
    /// Its settings, with those of the top.
    pub settings: ViewSettings,
}

/// A configuration with everything inherited, and with the content of all files that it names.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The source: an absolute path, or `org/name[@revision]`.
    pub source: Option<String>,
    /// The repository whose configuration and tokenizer the source takes over: as `source`.
    pub config_from: Option<String>,
    /// The repository that gives the tensors that the source lacks: as `source`.
    pub fill_from: Option<String>,
    /// The model that a run began with: as `source`.
    pub base: Option<String>,
    /// The mountpoint; absolute.
    pub mountpoint: Option<PathBuf>,
    /// The views, at least one. Only a single view may be without a name.
    pub views: Vec<ViewConfig>,
    /// How to mount.
    pub mount: MountSettings,
    /// How to serve over the network.
    pub serve: ServeSettings,
    /// Longest time until a daemon must be ready.
    pub start_limit: Option<TimeLimit>,
}

impl Default for Config {
    /// One view at the root, with default settings.
    fn default() -> Self {
        Self::of_file(FileSettings::default())
    }
}

impl Config {
    /// The configuration of a file: each view inherits the settings above it.
    pub fn of_file(file: FileSettings) -> Self {
        let FileSettings { mut top, views } = file;
        top.over(&Settings::by_default());
        let inherit = |(name, mut own): (String, Settings)| {
            own.over(&top);
            ViewConfig { name, settings: own.view }
        };
        let mut views: Vec<ViewConfig> = views.into_iter().map(inherit).collect();
        if views.is_empty() {
            views.push(ViewConfig { name: String::new(), settings: top.view });
        }
        let Settings { source, config_from, fill_from, base, mountpoint, mount, serve, start_limit, .. } = top;
        Self { source, config_from, fill_from, base, mountpoint, views, mount, serve, start_limit }
    }

    /// Applies other settings, which have precedence in every view.
    pub(crate) fn overlay(&mut self, said: Settings) {
        for view in &mut self.views {
            let mut settings = said.clone();
            settings.over(&Settings { view: std::mem::take(&mut view.settings), ..Settings::default() });
            view.settings = settings.view;
        }
        let mut top = said;
        top.over(&self.top());
        let Settings { source, config_from, fill_from, base, mountpoint, mount, serve, start_limit, .. } = top;
        let views = std::mem::take(&mut self.views);
        *self = Self { source, config_from, fill_from, base, mountpoint, views, mount, serve, start_limit };
    }

    /// The settings that hold for all views.
    pub(super) fn top(&self) -> Settings {
        let Self { source, config_from, fill_from, base, mountpoint, views: _, mount, serve, start_limit } =
            self.clone();
        Settings { source, config_from, fill_from, base, mountpoint, mount, serve, start_limit, ..Settings::default() }
    }
}
