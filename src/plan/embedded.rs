//! The families and layouts in the program: lists that the build script makes of the files under `families` and `layouts`.

include!(concat!(env!("OUT_DIR"), "/embedded.rs"));
