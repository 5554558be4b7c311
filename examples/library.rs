//! A mount by the library alone, with all that `ckfs mount` has: memory budget, checks of the sources, time limits of requests.
//!
//! ```text
//! cargo run --example library -- SOURCE MNT [NAME[=VALUE]...]     settings as `ckfs mount -o` takes them
//! ```

use std::{env, error::Error, io, path::PathBuf, process};

use ckfs::{
    config::{Config, options},
    fuse::{Succession, block_signals, serve_service},
    host::{Log, LogTarget},
    service::{Alive, Service, wait_registry, watch},
};

fn main() -> Result<(), Box<dyn Error>> {
    // Before the first thread starts: the mount takes its signals from a descriptor.
    block_signals()?;
    tracing_subscriber::fmt().with_writer(io::stderr).init();
    let log = Log::start(LogTarget::stderr());

    let args: Vec<String> = env::args().skip(1).collect();
    let [source, mountpoint, settings @ ..] = &args[..] else { return Err("expected SOURCE and MNT".into()) };
    let split = |setting: &'_ String| {
        let (name, value) = setting.split_once('=').map_or((&**setting, None), |(name, value)| (name, Some(value)));
        (name.to_owned(), value.map(str::to_owned))
    };
    let settings: Vec<(String, Option<String>)> = settings.iter().map(split).collect();
    let settings = options::parse(settings.iter().map(|(name, value)| (&**name, value.as_deref())))?;
    let mut config = Config::gather(&[&settings], &env::current_dir()?)?;
    let mountpoint = PathBuf::from(mountpoint);
    (config.source, config.mountpoint) = (Some(source.clone()), Some(mountpoint.clone()));

    // Until files are served, another thread gives up storage that does not answer.
    let waits = wait_registry(&config.mount);
    let wait_watch = watch(
        &waits,
        |_| {},
        |message| {
            ckfs::host::tell(&format!("{message}\n"));
            process::exit(1)
        },
    )?;
    let mut service = Service::open(&mut config, &waits)?;
    drop(wait_watch);
    service.start()?;
    // No other process goes on with this mount, before or after.
    let alone = (Succession::None, None);
    let exit = serve_service(&service, &mountpoint, &log, alone, || ckfs::host::tell("ready\n"))?;
    if exit.is_clean() { Ok(()) } else { Err("open files were cut off".into()) }
}
