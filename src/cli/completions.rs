//! `ckfs completions`.

use clap::{Args, ValueEnum};
use clap_complete::aot::{Shell, generate};

use super::output;

/// Shells for which completions are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Of {
    Bash,
    Zsh,
    Fish,
}

/// Prints completions for a shell.
///
/// They complete commands, flags and the words that a flag takes. The packages of ckfs install them; after `cargo
/// install` they go to a place of yours.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs completions bash > ~/.local/share/bash-completion/completions/ckfs
  ckfs completions fish > ~/.config/fish/completions/ckfs.fish
  ckfs completions zsh > ~/.zfunc/_ckfs     with ~/.zfunc in zsh's fpath")]
pub(super) struct Completions {
    /// The shell.
    shell: Of,
}

impl Completions {
    /// Prints the completions of the program's command line, `command`.
    pub(super) fn run(&self, mut command: clap::Command) -> anyhow::Result<()> {
        output::print(&script(self.shell, &mut command)?)
    }
}

fn script(shell: Of, command: &mut clap::Command) -> anyhow::Result<String> {
    let shell = match shell {
        Of::Bash => Shell::Bash,
        Of::Zsh => Shell::Zsh,
        Of::Fish => Shell::Fish,
    };
    let mut text = Vec::new();
    generate(shell, command, "ckfs", &mut text);
    Ok(String::from_utf8(text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command() -> clap::Command {
        let mount = clap::Command::new("mount").about("Mounts").arg(clap::Arg::new("mesh").long("mesh"));
        clap::Command::new("ckfs").subcommand(mount)
    }

    #[test]
    fn each_shell_gets_its_own_script_with_commands_and_flags() {
        for (shell, sign) in
            [(Of::Bash, "complete -F _ckfs"), (Of::Zsh, "#compdef ckfs"), (Of::Fish, "complete -c ckfs")]
        {
            let text = script(shell, &mut command()).unwrap();
            for part in [sign, "mount", "mesh"] {
                assert!(text.contains(part), "{shell:?}, {part}: {text}");
            }
        }
    }
}
