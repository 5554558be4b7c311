//! The `ckfs` program; everything is in the library's [`ckfs::cli`].

#[cfg(any(target_env = "musl", test))]
mod compare_bytes;

/// The allocator of static programs: that of musl has one lock for all threads.
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    ckfs::cli::main()
}
