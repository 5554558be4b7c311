//! The identity of a local file: device, inode, whether it has a name, size, modification and status change time, all read from the open file.

use std::time::{Duration, SystemTime};

use nix::sys::stat::FileStat;

use super::super::{ContentName, calendar::utc_of_ns, this_process};

/// The identity of a file, compared with the pinned one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    device: u64,
    inode: u64,
    is_named: bool,
    pub(super) size_bytes: u64,
    modified_ns: i128,
    status_changed_ns: i128,
}

impl Identity {
    pub(super) fn of(stat: &FileStat) -> Self {
        let ns = |seconds: i64, ns: i64| i128::from(seconds) * 1_000_000_000 + i128::from(ns);
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            is_named: stat.st_nlink > 0,
            size_bytes: u64::try_from(stat.st_size).expect("the kernel gives no negative size"),
            modified_ns: ns(stat.st_mtime, stat.st_mtime_nsec),
            status_changed_ns: ns(stat.st_ctime, stat.st_ctime_nsec),
        }
    }

    /// The file and its state, in words of a record.
    pub(super) fn line(&self) -> String {
        let Self { device, inode, is_named: _, size_bytes, modified_ns, status_changed_ns } = self;
        format!("{device} {inode} {size_bytes} {modified_ns} {status_changed_ns}")
    }

    /// What names its content. The time of the last change of state counts only where it is the clock's: not if it has whole seconds,
    /// as images of disks and objects of services have, or if the file system `may_copy` the modification time and has done so. What
    /// names the content of such a file is of this process alone. A file system that `is_shared` says the same on all its machines.
    pub(super) fn content_name(&self, may_copy: bool, is_shared: bool) -> ContentName {
        let Self { device, inode, is_named: _, size_bytes, modified_ns, status_changed_ns } = self;
        let is_settable = status_changed_ns % 1_000_000_000 == 0 || (may_copy && modified_ns == status_changed_ns);
        let seen_by = if is_settable { this_process() } else { "" };
        let state = format!("{inode} {size_bytes} {modified_ns} {status_changed_ns} {seen_by}");
        if is_shared { ContentName::Anywhere(state) } else { ContentName::Here { state, device: *device } }
    }

    /// Whether it had this state already at `time`, and for some time before.
    pub(super) fn is_older_than(&self, time: SystemTime, by: Duration) -> bool {
        let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let ns = |time: Duration| i128::try_from(time.as_nanos()).unwrap_or(i128::MAX);
        self.status_changed_ns < ns(since).saturating_sub(ns(by))
    }

    /// The same identity with the times of another.
    pub(super) fn with_times_of(self, other: &Self) -> Self {
        Self { modified_ns: other.modified_ns, status_changed_ns: other.status_changed_ns, ..self }
    }

    /// The first aspect in which `found` differs, with both values; the most informative aspects come first.
    pub(super) fn difference(&self, found: &Self) -> Option<String> {
        type Row = (&'static str, fn(&Identity) -> i128, fn(i128) -> String);
        let number = |value: i128| value.to_string();
        let rows: [Row; 6] = [
            ("device", |of| of.device.into(), number),
            ("inode", |of| of.inode.into(), number),
            ("names (0 when deleted or replaced)", |of| of.is_named.into(), number),
            ("size in bytes", |of| of.size_bytes.into(), number),
            ("modification time", |of| of.modified_ns, utc_of_ns),
            ("status change time (content, name, links or permissions)", |of| of.status_changed_ns, utc_of_ns),
        ];
        let (aspect, of, shown) = rows.into_iter().find(|(_, of, _)| of(self) != of(found))?;
        Some(format!("{aspect}: expected {}, found {}", shown(of(self)), shown(of(found))))
    }

    pub(super) fn modified(&self) -> SystemTime {
        let magnitude = u64::try_from(self.modified_ns.unsigned_abs()).unwrap_or(u64::MAX);
        let distance = Duration::from_nanos(magnitude);
        if self.modified_ns >= 0 { SystemTime::UNIX_EPOCH + distance } else { SystemTime::UNIX_EPOCH - distance }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_may_be_older_than_1970() {
        let written = |modified_ns| {
            let identity =
                Identity { device: 1, inode: 2, is_named: true, size_bytes: 3, modified_ns, status_changed_ns: 0 };
            identity.modified()
        };
        let distance = Duration::new(1, 5);
        assert_eq!(written(1_000_000_005), SystemTime::UNIX_EPOCH + distance);
        assert_eq!(written(-1_000_000_005), SystemTime::UNIX_EPOCH - distance);
    }

    #[test]
    fn what_names_a_content_is_another_after_each_change_that_a_file_system_tells() {
        let written = Identity {
            device: 1,
            inode: 2,
            is_named: true,
            size_bytes: 3,
            modified_ns: 1_000_000_001,
            status_changed_ns: 1_000_000_001,
        };
        let name = |identity: Identity, may_copy| match identity.content_name(may_copy, false) {
            ContentName::Here { state, device } => (state, device),
            ContentName::Anywhere(name) => panic!("{name}"),
        };
        let own = name(written, false);
        assert_eq!(own, name(written, false));
        // Its modification time set back, another file of the same times, another length, another device.
        for other in [
            Identity { status_changed_ns: 2_000_000_001, ..written },
            Identity { inode: 9, ..written },
            Identity { size_bytes: 4, ..written },
            Identity { device: 9, ..written },
        ] {
            assert_ne!(own, name(other, false));
        }
        // Times that an image or a service gave say nothing to another process.
        let is_of_process = |(state, _): (String, u64)| state.ends_with(this_process());
        assert!(!is_of_process(own) && is_of_process(name(written, true)));
        assert!(is_of_process(name(Identity { status_changed_ns: 2_000_000_000, ..written }, false)));
        assert!(!is_of_process(name(Identity { status_changed_ns: 2_000_000_001, ..written }, true)));
        // All machines see the same of a network file system, though not its device number.
        let shared = |identity: Identity| identity.content_name(false, true);
        assert_eq!(shared(written), shared(Identity { device: 9, ..written }));
        assert_ne!(shared(written), shared(Identity { status_changed_ns: 2_000_000_001, ..written }));
    }
}
