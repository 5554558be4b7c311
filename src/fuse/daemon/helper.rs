//! The arguments of `mount.ckfs`, as mount(8) passes them.
//!
//! ```text
//! mount.ckfs SOURCE MOUNTPOINT [-s] [-f] [-n] [-v] [-N NAMESPACE] [-t TYPE] [-o OPTION[,OPTION]...]
//! ```
//!
//! Options that concern mount(8), systemd or the kernel's flags are consumed here; what remains is ckfs's own, for the
//! command line to map onto its flags. A comma inside a value is written `\,` or `\054`; fstab turns `\040` and its
//! like back itself, other callers may not, so these are read too. A lone backslash stays.

use std::{
    ffi::{OsStr, OsString},
    path::PathBuf,
};

/// What mount(8) asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HelperRequest {
    /// What to mount.
    pub source: OsString,
    /// Where.
    pub mountpoint: PathBuf,
    /// Options for ckfs, in order; those without `=` have no value.
    pub options: Vec<(String, Option<String>)>,
    /// `-f`: check everything but do not mount.
    pub fake: bool,
    /// `-s`: options that are not known are to be ignored.
    pub sloppy: bool,
    /// `-v`: say more.
    pub verbose: bool,
}

/// What is wrong with the arguments.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct HelperError(String);

/// Parses the arguments, without the program's name.
///
/// # Errors
/// [`HelperError`].
#[expect(clippy::unnecessary_debug_formatting, reason = "arguments are shown with escapes")]
pub fn parse_mount_helper(args: &[OsString]) -> Result<HelperRequest, HelperError> {
    let mut request = HelperRequest::default();
    let mut plain: Vec<&OsStr> = Vec::new();
    let mut options: Vec<String> = Vec::new();
    let mut args = args.iter();
    let mut flags_ended = false;
    while let Some(arg) = args.next() {
        let cluster = arg.to_str().and_then(|text| text.strip_prefix('-')).filter(|rest| !rest.is_empty());
        let Some(cluster) = cluster.filter(|_| !flags_ended) else {
            // Not a flag. A flag in another encoding cannot be one that is known.
            plain.push(arg);
            continue;
        };
        if cluster == "-" {
            flags_ended = true;
            continue;
        }
        let mut rest = cluster.chars();
        while let Some(flag) = rest.next() {
            match flag {
                's' => request.sloppy = true,
                'f' => request.fake = true,
                'v' => request.verbose = true,
                // There is no /etc/mtab to leave alone any more.
                'n' => {}
                'o' | 't' | 'N' => {
                    let tail = rest.as_str();
                    let tail = if tail.is_empty() { args.next().cloned() } else { Some(tail.into()) };
                    let value = tail.ok_or_else(|| HelperError(format!("flag -{flag} needs a value")))?;
                    let value = value.into_string();
                    let value = value.map_err(|value| HelperError(format!("options {value:?} are not UTF-8")))?;
                    match flag {
                        'o' => options.extend(split_options(&value)),
                        't' => check_type(&value)?,
                        // The namespace has been entered by mount(8) already.
                        _ => {}
                    }
                    break;
                }
                _ => return Err(HelperError(format!("unknown flag -{flag}"))),
            }
        }
    }
    let (source, mountpoint) = match plain[..] {
        [source, mountpoint] => (source, mountpoint),
        [_, _, argument, ..] => {
            return Err(HelperError(format!("unexpected argument {argument:?} after SOURCE and MOUNTPOINT")));
        }
        _ => {
            return Err(HelperError(format!("expected SOURCE and MOUNTPOINT, found {} arguments", plain.len())));
        }
    };
    source.clone_into(&mut request.source);
    request.mountpoint = mountpoint.into();
    for option in options {
        if let Some(option) = own_option(&option, request.sloppy)? {
            request.options.push(option);
        }
    }
    Ok(request)
}

fn check_type(found: &str) -> Result<(), HelperError> {
    match found {
        "ckfs" | crate::FS_TYPE => Ok(()),
        _ => Err(HelperError(format!("expected type ckfs or fuse.ckfs, found {found}"))),
    }
}

/// Splits at commas that are not escaped, and takes the escapes away.
fn split_options(list: &str) -> Vec<String> {
    let mut options = vec![String::new()];
    let mut rest = list;
    while let Some(c) = rest.chars().next() {
        let (unescaped, len) = match c {
            ',' => (None, 1),
            '\\' => unescape(&rest[1..]).map_or((Some('\\'), 1), |(c, len)| (Some(c), 1 + len)),
            c => (Some(c), c.len_utf8()),
        };
        match (unescaped, options.last_mut()) {
            (Some(c), Some(option)) => option.push(c),
            _ => options.push(String::new()),
        }
        rest = &rest[len..];
    }
    options.retain(|option| !option.is_empty());
    options
}

/// The character that follows a backslash, and the length of its name: `,`, `\`, or three octal digits of ASCII.
fn unescape(tail: &str) -> Option<(char, usize)> {
    match tail.as_bytes() {
        [b',', ..] => Some((',', 1)),
        [b'\\', ..] => Some(('\\', 1)),
        [a @ b'0'..=b'1', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] => {
            let code = (a - b'0') * 64 + (b - b'0') * 8 + (c - b'0');
            Some((char::from(code), 3))
        }
        _ => None,
    }
}

/// Options for other programs, and options that always hold here.
const CONSUMED: [&str; 29] = [
    "defaults",
    "ro",
    // mount(8) passes `rw` when the user asked for neither; the mount is read-only nevertheless.
    "rw",
    "nosuid",
    "nodev",
    "noatime",
    "nodiratime",
    "relatime",
    "norelatime",
    "strictatime",
    "atime",
    "lazytime",
    "nolazytime",
    "exec",
    "noexec",
    "async",
    "auto",
    "noauto",
    "nofail",
    "fail",
    "_netdev",
    "user",
    "nouser",
    "users",
    "owner",
    "group",
    "silent",
    "loud",
    "default_permissions",
];

/// Options that are consumed with any value or ending.
const CONSUMED_PREFIXES: [&str; 5] = ["x-", "X-", "user=", "comment=", "subtype="];

/// Options that ask for what a ckfs mount never is.
const REFUSED: [(&str, &str); 4] = [
    ("remount", "a ckfs mount does not change; unmount it and mount again"),
    ("suid", "ckfs mounts have no set-user-id files"),
    ("dev", "ckfs mounts have no devices"),
    ("sync", "ckfs mounts are read-only"),
];

fn own_option(option: &str, sloppy: bool) -> Result<Option<(String, Option<String>)>, HelperError> {
    if CONSUMED.contains(&option) || CONSUMED_PREFIXES.iter().any(|prefix| option.starts_with(prefix)) {
        return Ok(None);
    }
    if let Some((_, reason)) = REFUSED.iter().find(|(name, _)| *name == option) {
        return if sloppy { Ok(None) } else { Err(HelperError(format!("option {option}: {reason}"))) };
    }
    Ok(Some(match option.split_once('=') {
        Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
        None => (option.to_owned(), None),
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(args: &[&str]) -> Result<HelperRequest, HelperError> {
        parse_mount_helper(&args.iter().map(OsString::from).collect::<Vec<_>>())
    }

    fn options(list: &str) -> Vec<(String, Option<String>)> {
        parse(&["org/name", "/mnt", "-o", list]).unwrap().options
    }

    #[test]
    fn takes_what_mount_passes() {
        let request = parse(&["org/name", "/mnt", "-sfnv", "-o", "rw,mesh=fsdp=4:tensor=2", "-t", "ckfs"]).unwrap();
        let expected = HelperRequest {
            source: "org/name".into(),
            mountpoint: "/mnt".into(),
            options: vec![("mesh".into(), Some("fsdp=4:tensor=2".into()))],
            fake: true,
            sloppy: true,
            verbose: true,
        };
        assert_eq!(request, expected);
        let request =
            parse(&["-n", "-o", "allow_other", "-oconfig=/etc/c", "-t", "fuse.ckfs", "--", "-s", "m"]).unwrap();
        assert_eq!((request.source, request.mountpoint), ("-s".into(), "m".into()));
        assert_eq!(request.options, [("allow_other".into(), None), ("config".into(), Some("/etc/c".into()))]);
        assert_eq!(parse(&["a", "b", "-N", "/proc/1/ns/mnt"]).unwrap().options, []);
        assert_eq!(parse(&["-", "b"]).unwrap().source, "-");
    }

    #[test]
    fn refuses_wrong_arguments() {
        for (args, expected) in [
            (&[][..], "expected SOURCE and MOUNTPOINT, found 0 arguments"),
            (&["a"], "expected SOURCE and MOUNTPOINT, found 1 arguments"),
            (&["a", "b", "c"], "unexpected argument \"c\" after SOURCE and MOUNTPOINT"),
            (&["a", "b", "-x"], "unknown flag -x"),
            (&["a", "b", "--sloppy"], "unknown flag --"),
            (&["a", "b", "-o"], "flag -o needs a value"),
            (&["a", "b", "-vt"], "flag -t needs a value"),
            (&["a", "b", "-t", "ext4"], "expected type ckfs or fuse.ckfs, found ext4"),
            (&["a", "b", "-o", "sync"], "option sync: ckfs mounts are read-only"),
            (
                &["a", "b", "-o", "ro,remount"],
                "option remount: a ckfs mount does not change; unmount it and mount again",
            ),
        ] {
            assert_eq!(parse(args).unwrap_err().to_string(), expected, "{args:?}");
        }
        assert_eq!(parse(&["a", "b", "-s", "-o", "sync"]).unwrap().options, []);
        assert_eq!(parse(&["a", "b", "-o", "rw"]).unwrap().options, []);
    }

    #[test]
    fn leaves_only_own_options() {
        for list in [
            "defaults,ro,noatime,nodev,nosuid,noexec,_netdev,nofail,noauto,user,users,user=root,,",
            "x-systemd.automount,x-systemd.requires=a=b,X-mount.mkdir,comment=x,relatime",
        ] {
            assert_eq!(options(list), [], "{list}");
        }
        let own = "layout=hf,dtype=bf16,allow_other,nonsense,xattr=1,username=x";
        let names: Vec<_> = options(own).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["layout", "dtype", "allow_other", "nonsense", "xattr", "username"]);
    }

    #[test]
    fn reads_escapes() {
        for (list, expected) in [
            ("mesh=fsdp=4\\,tensor=2", "fsdp=4,tensor=2"),
            ("mesh=fsdp=4\\054tensor=2", "fsdp=4,tensor=2"),
            ("mesh=fsdp=4:tensor=2", "fsdp=4:tensor=2"),
            ("mesh=a\\040b\\134c\\\\d", "a b\\c\\d"),
            ("mesh=a\\x\\9\\", "a\\x\\9\\"),
            ("mesh=\\777\\200", "\\777\\200"),
            ("mesh=\u{e9}\\,\u{1f600}", "\u{e9},\u{1f600}"),
            ("mesh=", ""),
        ] {
            assert_eq!(options(list), [("mesh".to_owned(), Some(expected.to_owned()))], "{list}");
        }
    }

    proptest! {
        #[test]
        fn any_value_survives_escaping(value in "[ -~\u{e9}]{0,20}") {
            let escaped = value.replace('\\', "\\\\").replace(',', "\\,");
            prop_assert_eq!(options(&format!("ro,layout={escaped},nofail")), [("layout".to_owned(), Some(value))]);
        }

        #[test]
        fn never_panics(args: Vec<String>) {
            let _ = parse_mount_helper(&args.into_iter().map(OsString::from).collect::<Vec<_>>());
        }
    }
}
