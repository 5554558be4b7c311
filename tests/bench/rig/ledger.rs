//! What reads cost: processor time of the reader and of the daemon, page faults, and changes of the running thread.
//!
//! Times of a virtual machine vary by a factor of two from run to run, processor time per byte by a tenth.

#![allow(clippy::cast_precision_loss, reason = "figures for people")]

use std::{
    fs,
    ops::{AddAssign, Sub},
    path::Path,
};

use nix::sys::resource::{UsageWho, getrusage};
use serde_json::{Value, json};

use super::Result;

/// What a process used so far, or between two moments.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    /// Processor seconds in the program, and in the kernel for it.
    pub(crate) user: f64,
    pub(crate) kernel: f64,
    /// Page faults that needed no disk.
    pub(crate) faults: f64,
    /// How often a thread stopped to wait, or was stopped.
    pub(crate) switches: f64,
}

impl Usage {
    /// Of this process.
    pub(crate) fn own() -> Result<Self> {
        let usage = getrusage(UsageWho::RUSAGE_SELF)?;
        let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
        Ok(Self {
            user: seconds(usage.user_time()),
            kernel: seconds(usage.system_time()),
            faults: usage.minor_page_faults() as f64,
            switches: (usage.voluntary_context_switches() + usage.involuntary_context_switches()) as f64,
        })
    }

    /// Of another process, by its directory under `/proc`. Threads that ended are not in its switches.
    pub(crate) fn of(process: &Path) -> Result<Self> {
        let stat = fs::read_to_string(process.join("stat"))?;
        // The name, in parentheses, may contain anything. The next word is field 3 of proc(5).
        let (_, rest) = stat.rsplit_once(')').ok_or("a stat file without a name")?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let field = |number: usize| -> Result<f64> { Ok(fields.get(number - 3).ok_or("a short stat file")?.parse()?) };
        let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.ok_or("no clock ticks")? as f64;
        let mut switches = 0.0;
        for thread in fs::read_dir(process.join("task"))? {
            // A thread may end meanwhile.
            let status = fs::read_to_string(thread?.path().join("status")).unwrap_or_default();
            for line in status.lines().filter(|line| line.contains("ctxt_switches")) {
                switches += line.rsplit(char::is_whitespace).next().unwrap_or_default().parse::<f64>()?;
            }
        }
        Ok(Self { user: field(14)? / ticks, kernel: field(15)? / ticks, faults: field(10)?, switches })
    }
}

impl Sub for Usage {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            user: self.user - before.user,
            kernel: self.kernel - before.kernel,
            faults: self.faults - before.faults,
            switches: self.switches - before.switches,
        }
    }
}

/// The usage of reader and daemon over reads of some bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ledger {
    reader: Usage,
    daemon: Usage,
    gb: f64,
}

impl AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        self.user += other.user;
        self.kernel += other.kernel;
        self.faults += other.faults;
        self.switches += other.switches;
    }
}

impl Ledger {
    /// Runs `read`, which returns its bytes and seconds, and adds what it cost this process and `daemon`.
    pub(crate) fn add(&mut self, daemon: &Path, read: impl FnOnce() -> Result<(u64, f64)>) -> Result<(u64, f64)> {
        let before = (Usage::own()?, Usage::of(daemon)?);
        let (bytes, seconds) = read()?;
        self.reader += Usage::own()? - before.0;
        self.daemon += Usage::of(daemon)? - before.1;
        self.gb += bytes as f64 / 1e9;
        Ok((bytes, seconds))
    }

    /// The figures for each GB, as words of a table.
    pub(crate) fn text(&self) -> String {
        let of = |usage: &Usage| format!("{:.2}+{:.2}", usage.user / self.gb, usage.kernel / self.gb);
        let per = |value: f64| value / self.gb / 1e3;
        format!(
            "s/GB user+kernel: reader {}, daemon {}; thousand faults {:.1}, {:.1}; thousand switches {:.1}, {:.1}",
            of(&self.reader),
            of(&self.daemon),
            per(self.reader.faults),
            per(self.daemon.faults),
            per(self.reader.switches),
            per(self.daemon.switches),
        )
    }

    /// The same as JSON.
    pub(crate) fn to_json(self) -> Value {
        let of = |usage: Usage| {
            json!({"user_seconds_per_gb": usage.user / self.gb, "kernel_seconds_per_gb": usage.kernel / self.gb,
                "faults_per_gb": usage.faults / self.gb, "switches_per_gb": usage.switches / self.gb})
        };
        json!({"reader": of(self.reader), "daemon": of(self.daemon)})
    }
}
