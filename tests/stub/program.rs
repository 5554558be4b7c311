//! The stub servers as a program.
//!
//! ```text
//! stub hub ORG/NAME=DIR...   prints the Hub's address; switches by GET /_stub/set?NAME=VALUE
//! stub store ROOT            prints the address of an object store whose buckets are the directories of ROOT; switches likewise
//! stub conform ADDRESS DIR   checks the contract of sources on the repository at ADDRESS, whose files are those of DIR
//! ```
//!
//! A server ends when its standard input does.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program for tests")]

#[cfg(feature = "remote")]
#[path = "../common/contract.rs"]
#[allow(dead_code, unreachable_pub, reason = "the tests of local sources use the rest")]
mod contract;
#[cfg(feature = "remote")]
#[path = "../common/objects.rs"]
#[allow(dead_code, unreachable_pub, reason = "the tests of the cache use the rest")]
mod objects;
#[path = "mod.rs"]
mod stub;

use std::{
    io::{self, Read, Write},
    path::Path,
};

fn wait(address: &str) {
    println!("{address}");
    io::stdout().flush().unwrap();
    let _ = io::stdin().read_to_end(&mut Vec::new());
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.first().map(String::as_str) {
        Some("hub") => {
            let hub = stub::hub::HubStub::start();
            for pair in &args[1..] {
                let (repo, dir) = pair.split_once('=').expect("ORG/NAME=DIR");
                let (repo, branch) = repo.split_once('@').unwrap_or((repo, "main"));
                hub.publish(repo, branch, Path::new(dir));
            }
            wait(&hub.url());
        }
        Some("store") => {
            let store = stub::store::StoreStub::start(Path::new(&args[1]));
            wait(&store.server.url());
        }
        #[cfg(feature = "remote")]
        Some("conform") => contract::address_conforms(&args[1], Path::new(&args[2])),
        _ => panic!("expected hub, store or conform"),
    }
}
