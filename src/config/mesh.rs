//! The device mesh: named axes with sizes.
//!
//! Device `d` is the row-major number of its coordinates over the axes in the order given, the last axis fastest.

use std::{fmt, num::IntErrorKind};

/// Most devices a mesh may have.
pub const DEVICES_MAX: u64 = 1 << 20;

/// Most devices that a view lists. Each takes about 1 KiB of memory, and a row in every directory.
pub const DEVICES_LISTED_MAX: u64 = 1 << 16;

/// Longest text of a device's coordinates, in bytes: the name of its link under `mesh/`.
const LINK_BYTES_MAX: usize = 255;

/// One named axis of a mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshAxis {
    /// Name, such as `fsdp`.
    pub name: String,
    /// Number of positions along it; at least 1.
    pub size: u64,
}

/// Named axes with sizes; without axes, a single device.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Mesh {
    axes: Vec<MeshAxis>,
}

/// The part of a text that is no axis.
fn malformed(found: &str) -> String {
    format!("mesh: expected name=size, found {found:?}: for example {}", example(found))
}

/// A mesh that may be meant by a text without a size, or without a name.
fn example(found: &str) -> String {
    let (name, size) = found.split_once([':', ' ']).unwrap_or((found, ""));
    let is_size = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let name_of = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphabetic()) && !text.is_empty();
    match (name_of(name), is_size(name), is_size(size)) {
        (true, _, true) => format!("{name}={size}"),
        (true, _, false) => format!("{name}=8"),
        (false, true, _) => format!("fsdp={name}"),
        (false, false, _) => "fsdp=4,tensor=2".to_owned(),
    }
}

impl Mesh {
    /// Reads `fsdp=4,tensor=2`. An empty text is the mesh of one device.
    ///
    /// # Errors
    /// Why it is no mesh, as users read it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let too_large = || format!("mesh {text:?} has more than {DEVICES_MAX} devices");
        let mut axes: Vec<MeshAxis> = Vec::new();
        let mut devices = 1u64;
        let parts = (!text.trim().is_empty()).then(|| text.split([',', ':']));
        for part in parts.into_iter().flatten().map(str::trim) {
            // The mesh `fsdp:4` has one part that is wrong, not two.
            let whole = if text.contains('=') { part } else { text };
            let (name, size) = part.split_once('=').ok_or_else(|| malformed(whole))?;
            let (name, size) = (name.trim(), size.trim());
            let valid = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
            if name.is_empty() || !name.chars().all(valid) {
                return Err(malformed(part));
            }
            let size: u64 = match size.parse() {
                Ok(size) if size > 0 => size,
                Err(error) if *error.kind() == IntErrorKind::PosOverflow => return Err(too_large()),
                Ok(_) | Err(_) => {
                    return Err(format!("mesh axis {name:?}: expected a size of at least 1, found {size:?}"));
                }
            };
            if axes.iter().any(|axis| axis.name == name) {
                return Err(format!("mesh axis {name:?} is named twice"));
            }
            devices = devices.checked_mul(size).filter(|devices| *devices <= DEVICES_MAX).ok_or_else(too_large)?;
            axes.push(MeshAxis { name: name.to_owned(), size });
        }
        let mesh = Self { axes };
        let longest = mesh.path(devices - 1).join(",").len();
        if longest > LINK_BYTES_MAX {
            return Err(format!(
                "the mesh's coordinates take {longest} bytes when written out, at most {LINK_BYTES_MAX} are possible"
            ));
        }
        Ok(mesh)
    }

    /// The axes, outermost first.
    pub fn axes(&self) -> &[MeshAxis] {
        &self.axes
    }

    /// Number of devices: the product of the sizes.
    pub fn devices(&self) -> u64 {
        self.axes.iter().map(|axis| axis.size).product()
    }

    /// Position of an axis in the list.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.axes.iter().position(|axis| axis.name == name)
    }

    /// The same mesh with another size of an axis, if that is a mesh.
    pub fn with_size(&self, name: &str, size: u64) -> Option<Self> {
        let sized = |axis: &MeshAxis| format!("{}={}", axis.name, if axis.name == name { size } else { axis.size });
        Self::parse(&self.axes.iter().map(sized).collect::<Vec<_>>().join(",")).ok()
    }

    /// Coordinates of device `device`, one per axis.
    pub fn coordinates(&self, device: u64) -> Vec<u64> {
        let mut rest = device;
        let mut coordinates = vec![0; self.axes.len()];
        for (coordinate, axis) in coordinates.iter_mut().zip(&self.axes).rev() {
            *coordinate = rest % axis.size;
            rest /= axis.size;
        }
        coordinates
    }

    /// Directory names that lead to device `device`: `fsdp=3`, `tensor=1`.
    pub fn path(&self, device: u64) -> Vec<String> {
        let coordinates = self.coordinates(device);
        self.axes.iter().zip(coordinates).map(|(axis, at)| format!("{}={at}", axis.name)).collect()
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes: Vec<String> = self.axes.iter().map(|axis| format!("{}={}", axis.name, axis.size)).collect();
        f.write_str(&axes.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_count_row_major_with_the_last_axis_fastest() {
        let mesh = Mesh::parse("fsdp=4, tensor=2").unwrap();
        assert_eq!(mesh.devices(), 8);
        assert_eq!(mesh.coordinates(3), [1, 1]);
        assert_eq!(mesh.path(6), ["fsdp=3", "tensor=0"]);
        assert_eq!(mesh.to_string(), "fsdp=4,tensor=2");
        assert_eq!(Mesh::parse("").unwrap().devices(), 1);
    }

    #[test]
    fn malformed_meshes_are_refused() {
        for (text, found, example) in [
            ("fsdp", "fsdp", "fsdp=8"),
            ("8", "8", "fsdp=8"),
            ("fsdp:4", "fsdp:4", "fsdp=4"),
            ("fsdp=2,,tensor=2", "", "fsdp=4,tensor=2"),
        ] {
            let error = Mesh::parse(text).unwrap_err();
            assert_eq!(error, format!("mesh: expected name=size, found {found:?}: for example {example}"));
        }
        let many: Vec<String> = (0..300).map(|axis| format!("a{axis}=1")).collect();
        for (text, expected) in [
            ("fsdp=0", "mesh axis \"fsdp\": expected a size of at least 1, found \"0\""),
            ("fsdp= x", "mesh axis \"fsdp\": expected a size of at least 1, found \"x\""),
            ("fsdp=99999999999999999999", "mesh \"fsdp=99999999999999999999\" has more than 1048576 devices"),
            ("a=2,a=3", "mesh axis \"a\" is named twice"),
            ("a=1048576,b=2", "mesh \"a=1048576,b=2\" has more than 1048576 devices"),
            ("../x=2", "mesh: expected name=size, found \"../x=2\": for example fsdp=4,tensor=2"),
            (&many.join(","), "the mesh's coordinates take 1989 bytes when written out, at most 255 are possible"),
        ] {
            assert_eq!(Mesh::parse(text).unwrap_err(), expected);
        }
    }
}
