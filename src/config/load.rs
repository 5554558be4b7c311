//! Files that settings name. They are read here, and nowhere else in this layer.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{
    Average, Config, ConfigError, FileSettings, LayoutChoice, Settings, ShardChoice, ViewSettings,
    file::parse_shard_rules,
};

/// The text of a file.
///
/// # Errors
/// [`ConfigError::Read`].
fn read_text(file: &Path) -> Result<String, ConfigError> {
    fs::read_to_string(file).map_err(|error| {
        let is_missing = error.kind() == std::io::ErrorKind::NotFound;
        let reason = if is_missing { "no such file".to_owned() } else { error.to_string() };
        ConfigError::Read { file: file.to_owned(), reason }
    })
}

/// Where the relative paths in a file begin.
///
/// # Errors
/// [`ConfigError::Read`].
fn base_of(file: &Path) -> Result<PathBuf, ConfigError> {
    let mut base = std::path::absolute(file)
        .map_err(|error| ConfigError::Read { file: file.to_owned(), reason: error.to_string() })?;
    base.pop();
    Ok(base)
}

impl Config {
    /// Reads a configuration file, and the files that it names.
    ///
    /// # Errors
    /// [`ConfigError`], naming the line.
    pub fn load(file: &Path) -> Result<Self, ConfigError> {
        Self::of_text(&read_text(file)?, file, &base_of(file)?)
    }

    /// Reads a configuration from a text, and the files that it names. `file` is its name for messages. Relative paths
    /// begin at `base`.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn of_text(text: &str, file: &Path, base: &Path) -> Result<Self, ConfigError> {
        let mut settings = FileSettings::parse(text, file)?;
        // A name of the hub's cache stays one, unless there is a directory of that name beside the file.
        let Settings { source, config_from, fill_from, base: model, mount, .. } = &mut settings.top;
        let averaged = mount.average.iter_mut().flat_map(Average::sources_mut);
        // A path that is complete needs no look at its storage, which may give no answer.
        for source in [source, config_from, fill_from, model]
            .into_iter()
            .flatten()
            .chain(averaged)
            .filter(|source| Path::new(source).is_relative())
        {
            let path = base.join(&*source);
            if path.exists() {
                *source = path.display().to_string();
            }
        }
        let last = settings.top.mount.average.iter_mut().flat_map(Average::sources_mut).last();
        settings.top.source = settings.top.source.or(last.cloned());
        read_named_files(&mut settings.top, base)?;
        for (_, view) in &mut settings.views {
            read_named_files(view, base)?;
        }
        Ok(Self::of_file(settings))
    }

    /// As [`Config::of_text`], for a text whose `source` is as good as any. No file is touched: those that it names may be on
    /// storage that gives no answer. The texts of layouts are empty, and files of sharding rules stay names.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn without_files(text: &str, file: &Path, base: &Path) -> Result<Self, ConfigError> {
        let mut settings = FileSettings::parse(text, file)?;
        settings.top.rebase(base);
        settings.views.iter_mut().for_each(|(_, view)| view.rebase(base));
        Ok(Self::of_file(settings))
    }

    /// As [`Config::without_files`], for the text of a file. Only this file is read.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn load_alone(file: &Path) -> Result<Self, ConfigError> {
        Self::without_files(&read_text(file)?, file, &base_of(file)?)
    }

    /// The configuration from command lines and a file. The first of `lines` that names a file determines the file.
    /// Command lines have precedence over the file, the first line over the later ones.
    ///
    /// # Errors
    /// [`ConfigError`] if a file cannot be read or is malformed.
    pub fn gather(lines: &[&Settings], base: &Path) -> Result<Self, ConfigError> {
        let mut said = Settings::default();
        for line in lines {
            said.over(line);
        }
        let mut config = said.config.as_deref().map(Self::load).transpose()?.unwrap_or_default();
        read_named_files(&mut said, base)?;
        config.overlay(said);
        Ok(config)
    }
}

impl LayoutChoice {
    /// Reads the layout's file, if the layout is a file.
    ///
    /// # Errors
    /// [`ConfigError::Read`].
    pub fn read_file(&mut self) -> Result<(), ConfigError> {
        if let Self::File { path, text } = self {
            *text = read_text(path)?.into();
        }
        Ok(())
    }
}

/// Reads the files that settings name; relative paths begin at `base`.
fn read_named_files(settings: &mut Settings, base: &Path) -> Result<(), ConfigError> {
    settings.rebase(base);
    let ViewSettings { layout, shard, shard_rules, .. } = &mut settings.view;
    if let Some(layout) = layout {
        layout.read_file()?;
    }
    if let Some(ShardChoice::File(file)) = shard {
        let rules = parse_shard_rules(&read_text(file)?, file)?;
        *shard = Some(rules.shard.unwrap_or(ShardChoice::Auto));
        shard_rules.extend(rules.shard_rules);
    }
    Ok(())
}
