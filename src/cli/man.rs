//! `ckfs man` and `ckfs completions`: manual pages, and scripts for shells, made from the same declarations as the help.

use std::{fs, path::PathBuf};

use anyhow::Context;
use clap::Args;
use clap_complete::aot::{Shell, generate};
use clap_mangen::Man;

use super::output;

/// The commands by what they are for, as `ckfs --help` lists them.
pub(super) const COMMAND_GROUPS: [(&str, &[&str]); 5] = [
    ("Mount", &["mount", "run", "umount", "status", "restart", "serve", "csi"]),
    ("Look", &["plan", "explain", "cat"]),
    ("Move", &["export", "fetch", "cache"]),
    ("Trust", &["verify", "sums"]),
    ("Host", &["doctor", "metrics", "demo", "completions", "man", "help"]),
];

/// The page of the program's other name. It is in section 8, where mount(8) and its helpers are.
const HELPER: (&str, &str) = ("mount.ckfs.8", ".so man1/ckfs-mount.1\n");

/// Prints the manual page, or writes the pages of all commands.
///
/// Without DIR, the page ckfs(1) goes to standard output; with the name of a command, its page. With DIR, there is one
/// file per command, such as ckfs-mount.1, and mount.ckfs.8; files of these names are replaced.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs man | man -l -
  ckfs man plan | man -l -
  ckfs man ~/.local/share/man/man1")]
pub(super) struct Manual {
    /// Where the pages are written, made if it does not exist; or a command, whose page is printed.
    #[arg(value_name = "DIR|COMMAND")]
    dir: Option<PathBuf>,
}

impl Manual {
    /// Prints or writes the pages of the program's command line, `command`.
    pub(super) fn run(&self, command: clap::Command) -> anyhow::Result<()> {
        let pages = pages(command)?;
        let Some(dir) = &self.dir else {
            return output::print(&pages[0].1);
        };
        // The name of a command is no directory, which is ./plan.
        let of_command = format!("ckfs-{}.1", dir.display());
        if let Some((_, text)) = pages.iter().find(|(name, _)| *name == of_command) {
            return output::print(text);
        }
        fs::create_dir_all(dir).with_context(|| format!("{}", dir.display()))?;
        for (name, text) in &pages {
            let path = dir.join(name);
            fs::write(&path, text).with_context(|| path.display().to_string())?;
        }
        Ok(())
    }
}

/// File names and texts, the page of the program first.
fn pages(command: clap::Command) -> anyhow::Result<Vec<(String, String)>> {
    // Pages are the same for every build of a version.
    let mut command = command.disable_help_subcommand(true).long_version(None);
    command.build();
    let mut pages = vec![page(&command, "ckfs", &["ckfs-mount.1", "ckfs-plan.1", "mount.8", "fusermount3.1"])?];
    let commands: Vec<_> = command.get_subcommands().filter(|command| !command.is_hide_set()).collect();
    for command in &commands {
        let name = format!("ckfs-{}", command.get_name());
        let parts: Vec<_> = command.get_subcommands().filter(|part| !part.is_hide_set()).collect();
        let mut others = vec!["ckfs.1".to_owned()];
        others.extend(parts.iter().map(|part| format!("{name}-{}.1", part.get_name())));
        others.extend(of_same_group(&commands, command.get_name()));
        if command.get_name() == "mount" {
            others.push("mount.8".to_owned());
        }
        pages.push(page(command, &name, &others)?);
        for part in parts {
            pages.push(page(
                part,
                &format!("{name}-{}", part.get_name()),
                &["ckfs.1".to_owned(), format!("{name}.1")],
            )?);
        }
    }
    pages.push((HELPER.0.to_owned(), HELPER.1.to_owned()));
    Ok(pages)
}

/// The pages of the commands beside one in the help.
fn of_same_group<'a>(commands: &'a [&clap::Command], command: &'a str) -> impl Iterator<Item = String> + 'a {
    let group = COMMAND_GROUPS.iter().find(|(_, names)| names.contains(&command)).map_or(&[][..], |(_, names)| *names);
    let others = commands.iter().map(|other| other.get_name());
    others.filter(move |name| *name != command && group.contains(name)).map(|name| format!("ckfs-{name}.1"))
}

/// The page of a command, which refers to `others`, such as `mount.8`.
fn page(command: &clap::Command, name: &str, others: &[impl AsRef<str>]) -> anyhow::Result<(String, String)> {
    let source = format!("ckfs {}", env!("CARGO_PKG_VERSION"));
    let mut text = Vec::new();
    let man = Man::new(command.clone().display_name(name.to_owned())).title(name.to_uppercase()).section("1");
    let man = man.source(source).manual("ckfs");
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    man.render_options_section(&mut text)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut text)?;
    }
    let mut text = String::from_utf8(text)?;
    if let Some(more) = command.get_after_long_help() {
        text.push_str(&notes(&more.to_string()));
    }
    text.push_str(&see_also(others));
    Ok((format!("{name}.1"), text))
}

fn see_also(pages: &[impl AsRef<str>]) -> String {
    let reference = |page: &str| {
        let (name, section) = page.rsplit_once('.').unwrap_or((page, "1"));
        format!(".BR {} ({section})", name.replace('-', "\\-"))
    };
    let references: Vec<_> = pages.iter().map(|page| reference(page.as_ref())).collect();
    format!(".SH SEE ALSO\n{}\n", references.join(" ,\n"))
}

/// The text after the help, line by line: its columns would not survive filled lines.
fn notes(text: &str) -> String {
    let mut section = ".SH NOTES\n.nf\n".to_owned();
    for line in text.lines() {
        // A point or an apostrophe at the start of a line would be a request to the formatter.
        let guard = if line.starts_with(['.', '\'']) { "\\&" } else { "" };
        section.extend([guard, &line.replace('\\', "\\e").replace('-', "\\-"), "\n"]);
    }
    section + ".fi\n"
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
    #[arg(value_parser = ["bash", "zsh", "fish"])]
    shell: String,
}

impl Completions {
    /// Prints the completions of the program's command line, `command`.
    pub(super) fn run(&self, mut command: clap::Command) -> anyhow::Result<()> {
        output::print(&script(self.shell.parse().map_err(anyhow::Error::msg)?, &mut command)?)
    }
}

fn script(shell: Shell, command: &mut clap::Command) -> anyhow::Result<String> {
    let mut text = Vec::new();
    generate(shell, command, "ckfs", &mut text);
    Ok(String::from_utf8(text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command() -> clap::Command {
        let mount =
            clap::Command::new("mount").about("Mounts a checkpoint").after_long_help("Examples:\n  ckfs mount a b");
        let mount = mount.arg(clap::Arg::new("mesh").long("mesh"));
        let hidden = clap::Command::new("secret").hide(true);
        let umount = clap::Command::new("umount").about("Unmounts it");
        let cache = clap::Command::new("cache")
            .about("Looks at it")
            .subcommands([clap::Command::new("list").about("Lists it")]);
        clap::Command::new("ckfs")
            .version("1.2.3")
            .long_version("1.2.3\ncommit x")
            .subcommands([mount, hidden, cache, umount])
    }

    #[test]
    fn every_command_has_a_page() {
        let pages = pages(command()).unwrap();
        let names: Vec<_> = pages.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(
            names,
            ["ckfs.1", "ckfs-mount.1", "ckfs-cache.1", "ckfs-cache-list.1", "ckfs-umount.1", "mount.ckfs.8"]
        );
        for (page, other) in [
            (0, "ckfs\\-plan (1)"),
            (1, "ckfs\\-umount (1)"),
            (1, "mount (8)"),
            (2, "ckfs\\-cache\\-list (1)"),
            (3, "ckfs\\-cache (1)"),
        ] {
            let (_, also) = pages[page].1.split_once(".SH SEE ALSO\n").unwrap();
            assert!(also.contains(&format!(".BR {other}")), "{also}");
        }
        assert!(pages[0].1.contains(".TH CKFS 1") && pages[0].1.contains("mount"), "{}", pages[0].1);
        assert!(!pages[0].1.contains("commit"), "the same for all builds of a version");
        for part in [".TH CKFS\\-MOUNT 1", "Mounts a checkpoint", "ckfs mount a b"] {
            assert!(
                pages[1].1.contains(part) || pages[1].1.contains(&part.replace("\\-", "-")),
                "{part}: {}",
                pages[1].1
            );
        }
    }

    #[test]
    fn notes_keep_their_lines() {
        assert_eq!(notes("Examples:\n  a \\, --b\n.c"), ".SH NOTES\n.nf\nExamples:\n  a \\e, \\-\\-b\n\\&.c\n.fi\n");
    }

    #[test]
    fn pages_are_written_and_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("new/man1");
        for _ in 0..2 {
            Manual { dir: Some(to.clone()) }.run(command()).unwrap();
        }
        assert_eq!(fs::read_dir(&to).unwrap().count(), 6);
        assert!(fs::read_to_string(to.join("mount.ckfs.8")).unwrap().starts_with(".so "));
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let refused = Manual { dir: Some(file.clone()) }.run(command()).unwrap_err();
        assert!(format!("{refused:#}").contains("file"), "{refused:#}");
    }

    #[test]
    fn each_shell_gets_its_own_script_with_commands_and_flags() {
        for (shell, sign) in
            [(Shell::Bash, "complete -F _ckfs"), (Shell::Zsh, "#compdef ckfs"), (Shell::Fish, "complete -c ckfs")]
        {
            let text = script(shell, &mut command()).unwrap();
            for part in [sign, "mount", "mesh"] {
                assert!(text.contains(part), "{shell:?}, {part}: {text}");
            }
        }
    }
}
