//! Flags, made from the table of settings.
//!
//! Commands take [`SourceFlags`], and `mount` takes [`ServingFlags`] too. Their [`Settings`] hold the values as typed.

use std::ffi::{OsStr, OsString};

use ckfs_config::{
    Arity, FORMER, Group, KEYS, LAYOUTS, Quantize, Requantize, SETTINGS, Setting, Settings, former, value::Choice,
};
use ckfs_host::{Log, log::FLUSH_LIMIT};
use ckfs_source::remote::url_schemes;
use clap::{
    Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches,
    builder::{PossibleValue, TypedValueParser},
    error::ErrorKind,
    parser::ValueSource,
};

/// Checks a word by its setting, and leaves it unchanged.
#[derive(Clone, Debug)]
struct Checked(&'static Setting);

/// The words that a setting takes: those of its placeholder in small letters, or those of its own list.
fn words(setting: &Setting) -> Vec<&'static str> {
    let (Arity::Required(form) | Arity::Optional(form, _)) = setting.arity else { return Vec::new() };
    match setting.name {
        "layout" => LAYOUTS.clone(),
        "quantize" => Quantize::words().collect(),
        "requantize" => Requantize::WORDS.iter().map(|(word, _)| *word).collect(),
        "dtype" | "dequantize" => vec!["bf16", "f16", "f32"],
        // A directory is completed by the shell.
        _ if form.contains("DIR") => Vec::new(),
        _ => form.split('|').filter(|word| word.bytes().all(|b| b.is_ascii_lowercase())).collect(),
    }
}

impl TypedValueParser for Checked {
    type Value = OsString;

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let words = words(self.0);
        (!words.is_empty()).then(|| Box::new(words.into_iter().map(PossibleValue::new)) as Box<_>)
    }

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, word: &OsStr) -> Result<OsString, clap::Error> {
        match (self.0.field.add)(&mut Settings::default(), word) {
            Ok(()) => Ok(word.to_owned()),
            // Clap's own parsers make the error message, which names the flag.
            Err(reason) => {
                let refuse = move |_: &str| Err::<OsString, String>(reason.clone());
                refuse.parse_ref(command, arg, word)
            }
        }
    }
}

/// What a source may be, for the help of the commands that take one.
pub(super) fn source_help() -> String {
    format!(
        "A directory (Hugging Face repository, Orbax, torch.distributed.checkpoint, files of the ranks of FSDP, DeepSpeed or \
         Megatron), a file (.safetensors, .pt, .bin), org/name[@revision] in the local cache or on the Hub, hf://org/name, {}",
        url_schemes()
    )
}

/// A sentence as clap shows it in a list.
fn without_period(text: &str) -> &str {
    text.strip_suffix('.').filter(|text| !text.ends_with('.')).unwrap_or(text)
}

/// The flag of a setting.
fn flag(setting: &'static Setting) -> Arg {
    let arg = Arg::new(setting.name).long(setting.name).help_heading(setting.group.headings()[0]);
    let arg = arg.help(without_period(setting.help)).global(setting.group == Group::Logging);
    let arg = arg.hide_short_help(!setting.is_common).hide_long_help(!setting.is_common);
    let arg = match setting.more {
        "" => arg,
        more => arg.long_help(format!("{}\n\n{}", setting.help, more.replace("{keys}", &KEYS))),
    };
    let several = if setting.repeats() { ArgAction::Append } else { ArgAction::Set };
    let arg = match setting.arity {
        Arity::Flag(_) => return arg.action(ArgAction::SetTrue),
        Arity::Required(name) => arg.value_name(name),
        Arity::Optional(name, word) => {
            arg.value_name(name).num_args(0..=1).require_equals(true).default_missing_value(word)
        }
    };
    // The help of a setting has its words already.
    let arg = arg.action(several).value_parser(Checked(setting)).hide_possible_values(true);
    setting.default.map_or(arg.clone(), |word| arg.default_value(word))
}

/// Every option that is a setting, for `ckfs help options`. The help of a command has the common ones.
pub(super) fn all_options() -> Command {
    let option = |setting: &'static Setting| {
        let arg = flag(setting).hide_short_help(false).hide_long_help(false).global(false);
        arg.help_heading(setting.group.headings()[1])
    };
    Command::new("options")
        .about("Every option, and the commands that take it; `ckfs COMMAND --help` has the common ones.")
        .disable_help_flag(true)
        .disable_version_flag(true)
        .max_term_width(100)
        .help_template("{about-with-newline}\n{all-args}\n")
        .args(SETTINGS.iter().filter(|setting| setting.is_flag).map(option))
}

/// The flags of former versions of `mount`. Each is refused by a message that names the present equivalent.
fn former_flags(groups: &[Group]) -> impl Iterator<Item = Arg> {
    let flag = |name: &'static str| {
        let refuse = move |_: &str| Err::<OsString, String>(former(name).unwrap_or_default());
        Arg::new(name).long(name).hide(true).num_args(0..=1).default_missing_value("").value_parser(refuse)
    };
    FORMER.iter().filter(move |_| groups.contains(&Group::Mount)).map(move |(name, _)| flag(name))
}

/// The settings that commands with those of these groups take as flags.
fn taken_with(groups: &[Group]) -> impl Iterator<Item = &'static Setting> {
    SETTINGS.iter().filter(move |setting| setting.is_taken_with(groups))
}

/// The values as typed.
fn typed(matches: &ArgMatches, groups: &[Group]) -> Result<Settings, clap::Error> {
    let mut settings = Settings::default();
    for setting in taken_with(groups) {
        if matches.value_source(setting.name) != Some(ValueSource::CommandLine) {
            continue;
        }
        let mut add = |word: &OsStr| {
            (setting.field.add)(&mut settings, word).map_err(|reason| clap::Error::raw(ErrorKind::InvalidValue, reason))
        };
        match setting.arity {
            Arity::Flag(word) => add(word.as_ref())?,
            Arity::Required(_) | Arity::Optional(..) => {
                matches.get_raw(setting.name).into_iter().flatten().try_for_each(add)?;
            }
        }
    }
    Ok(settings)
}

/// Declares the flags that some commands take.
macro_rules! flags {
    ($(#[$doc:meta])* $name:ident, $groups:expr) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default)]
        pub(super) struct $name {
            /// The values as typed.
            pub(super) settings: Settings,
        }

        impl Args for $name {
            fn augment_args(command: Command) -> Command {
                // A command's own argument takes the words of the setting too.
                let own: Vec<String> = command.get_arguments().map(|arg| arg.get_id().to_string()).collect();
                let others = taken_with($groups).filter(|setting| !own.iter().any(|own| own == setting.name));
                command.args(others.map(flag)).args(former_flags($groups))
            }

            fn augment_args_for_update(command: Command) -> Command {
                Self::augment_args(command)
            }
        }

        impl FromArgMatches for $name {
            fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
                Ok(Self { settings: typed(matches, $groups)? })
            }

            fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
                *self = Self::from_arg_matches(matches)?;
                Ok(())
            }
        }
    };
}

flags! {
    /// How commands choose and read a view.
    SourceFlags, Group::READERS
}

flags! {
    /// How to mount and serve.
    ServingFlags, &[Group::Mount]
}

#[cfg(feature = "serve")]
flags! {
    /// How to serve over the network.
    NetworkFlags, &[Group::Serve]
}

flags! {
    /// Where the log goes.
    LoggingFlags, &[Group::Logging]
}

/// How much is logged, and where to.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Logging")]
pub(super) struct LogFlags {
    /// Logs more: -v information, -vv details, -vvv everything.
    #[arg(short, long, action = ArgAction::Count, global = true)]
    pub(super) verbose: u8,
    /// Logs errors only, and shows no progress.
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(super) quiet: bool,
    #[command(flatten)]
    pub(super) file: LoggingFlags,
}

impl LogFlags {
    /// Tells the user what has been done, after what the log has so far.
    pub(super) fn tell(&self, log: &Log, text: &str) {
        if !self.quiet {
            log.flush(FLUSH_LIMIT);
            ckfs_host::tell(&format!("ckfs: {text}\n"));
        }
    }
}
