//! The `ckfs` program; everything is in the library's [`ckfs::cli`].

fn main() -> std::process::ExitCode {
    ckfs::cli::main()
}
