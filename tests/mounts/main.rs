//! Real mounts, and what goes wrong around them.

#[path = "../common/mod.rs"]
mod common;
mod double;
mod faults_change;
mod faults_health;
mod faults_memory;
mod faults_process;
mod faults_source;
mod mount;
mod permission;
