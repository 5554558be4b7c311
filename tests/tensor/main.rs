//! Views, tilings and kernels: what every virtual byte is made by. Nothing is read here; all of it is pure.

mod algebra;
#[path = "../common/mod.rs"]
mod common;
mod kernels;
mod mosaic;
mod tiling;
