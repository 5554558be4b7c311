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

/// Why a text is not a mesh.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// An axis is not written `name=size`.
    #[error("mesh: expected name=size, found {found:?}: for example {}", example(found))]
    Syntax {
        /// The text in its place.
        found: String,
    },
    /// A size is not a positive number.
    #[error("mesh axis {axis:?}: expected a size of at least 1, found {found:?}")]
    Size {
        /// The axis.
        axis: String,
        /// The text in the place of its size.
        found: String,
    },
    /// An axis is named twice.
    #[error("mesh axis {0:?} is named twice")]
    Repeated(String),
    /// Too many devices.
    #[error("mesh {0:?} has more than {DEVICES_MAX} devices")]
    TooLarge(String),
    /// A device's coordinates, written out, are too long for a file name.
    #[error("the mesh's coordinates take {0} bytes when written out, at most {LINK_BYTES_MAX} are possible")]
    Long(usize),
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
    /// [`MeshError`].
    pub fn parse(text: &str) -> Result<Self, MeshError> {
        let mut axes: Vec<MeshAxis> = Vec::new();
        let mut devices = 1u64;
        let parts = (!text.trim().is_empty()).then(|| text.split([',', ':']));
        for part in parts.into_iter().flatten().map(str::trim) {
            let (name, size) = part.split_once('=').ok_or_else(|| {
                // The mesh `fsdp:4` has one part that is wrong, not two.
                let found = if text.contains('=') { part } else { text };
                MeshError::Syntax { found: found.to_owned() }
            })?;
            let name = name.trim();
            let valid = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
            if name.is_empty() || !name.chars().all(valid) {
                return Err(MeshError::Syntax { found: part.to_owned() });
            }
            let size = size.trim();
            let size: u64 = match size.parse() {
                Ok(size) if size > 0 => size,
                Err(error) if *error.kind() == IntErrorKind::PosOverflow => {
                    return Err(MeshError::TooLarge(text.to_owned()));
                }
                Ok(_) | Err(_) => return Err(MeshError::Size { axis: name.to_owned(), found: size.to_owned() }),
            };
            if axes.iter().any(|axis| axis.name == name) {
                return Err(MeshError::Repeated(name.to_owned()));
            }
            devices = devices
                .checked_mul(size)
                .filter(|devices| *devices <= DEVICES_MAX)
                .ok_or_else(|| MeshError::TooLarge(text.to_owned()))?;
            axes.push(MeshAxis { name: name.to_owned(), size });
        }
        let mesh = Self { axes };
        let longest = mesh.path(devices - 1).join(",").len();
        if longest > LINK_BYTES_MAX {
            return Err(MeshError::Long(longest));
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
        for (index, axis) in self.axes.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{}={}", axis.name, axis.size)?;
        }
        Ok(())
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
            assert_eq!(error, MeshError::Syntax { found: found.into() });
            assert!(error.to_string().ends_with(&format!("example {example}")), "{error}");
        }
        assert!(matches!(Mesh::parse("fsdp=0"), Err(MeshError::Size { .. })));
        assert_eq!(Mesh::parse("fsdp= x"), Err(MeshError::Size { axis: "fsdp".into(), found: "x".into() }));
        assert!(matches!(Mesh::parse("fsdp=99999999999999999999"), Err(MeshError::TooLarge(_))));
        assert_eq!(Mesh::parse("a=2,a=3"), Err(MeshError::Repeated("a".into())));
        assert!(matches!(Mesh::parse("a=1048576,b=2"), Err(MeshError::TooLarge(_))));
        assert!(matches!(Mesh::parse("../x=2"), Err(MeshError::Syntax { .. })));
        let many: Vec<String> = (0..300).map(|axis| format!("a{axis}=1")).collect();
        assert!(matches!(Mesh::parse(&many.join(",")), Err(MeshError::Long(_))));
    }
}
