//! Marker segments of a file, before and between its scans (T.81, B).

use super::bits::next_marker;
use super::error::JpegError;
use super::huffman::Definition;
use super::standard;

/// Order in which the coefficients of a block are coded, as positions in row order. The last
/// position is repeated 64 times, for runs of zeros that are too long in damaged data.
pub(crate) const ZIGZAG: [u8; 128] = {
    const ORDER: [u8; 64] = [
        0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13,
        6, 7, 14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38,
        31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
    ];
    let mut all = [63; 128];
    let mut i = 0;
    while i < 64 {
        all[i] = ORDER[i];
        i += 1;
    }
    all
};

const START_OF_IMAGE: u8 = 0xd8;
const END_OF_IMAGE: u8 = 0xd9;

/// One channel of the image.
#[derive(Clone)]
pub(crate) struct Component {
    id: u8,
    /// Sampling factor across, relative to the largest one of the frame.
    pub(crate) h: usize,
    /// Sampling factor down, relative to the largest one of the frame.
    pub(crate) v: usize,
    quantization_slot: usize,
    /// Quantization table in row order, as it was when the first scan with this component began.
    pub(crate) quantization: Option<[u16; 64]>,
}

/// Coding of the image, without its tables.
#[derive(Clone)]
pub(crate) struct Frame {
    pub(crate) width_px: u32,
    pub(crate) height_px: u32,
    /// `true` if coefficients are coded bit by bit or band by band, in several scans.
    pub(crate) progressive: bool,
    pub(crate) components: Vec<Component>,
}

impl Frame {
    /// Returns the largest sampling factors across and down.
    pub(crate) fn max_sampling(&self) -> [usize; 2] {
        let h = self.components.iter().map(|component| component.h).max().unwrap_or(1);
        let v = self.components.iter().map(|component| component.v).max().unwrap_or(1);
        [h, v]
    }
}

/// Color space of the components.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ColorSpace {
    Gray,
    YCbCr,
    Rgb,
    Cmyk,
    /// CMYK whose first three inks are stored as YCbCr.
    Ycck,
}

/// A component's part in a scan.
pub(crate) struct ScanComponent {
    /// Index of the component in the frame.
    pub(crate) index: usize,
    /// Slots of the component's Huffman tables.
    pub(crate) dc_slot: usize,
    pub(crate) ac_slot: usize,
}

/// The header of a scan.
pub(crate) struct Scan {
    pub(crate) components: Vec<ScanComponent>,
    /// First and last coefficient in zigzag order.
    pub(crate) band: [usize; 2],
    /// Lowest bit of the coefficients that earlier scans have coded; 0 in the first scan.
    pub(crate) high: u8,
    /// Lowest bit of the coefficients that this scan codes.
    pub(crate) low: u8,
    /// Position of the scan's data.
    pub(crate) data: usize,
}

/// Reads the segments of a file one after another.
pub(crate) struct Segments<'a> {
    bytes: &'a [u8],
    at: usize,
    frame: Option<Frame>,
    quantization: [Option<[u16; 64]>; 4],
    dc: [Option<Definition>; 4],
    ac: [Option<Definition>; 4],
    /// Number of MCUs between two restart markers, 0 without any.
    pub(crate) restart_interval: usize,
    is_jfif: bool,
    /// Adobe's code for the color space.
    adobe_transform: Option<u8>,
    exif: Option<&'a [u8]>,
}

impl<'a> Segments<'a> {
    /// Creates a reader at the start of a file.
    pub(crate) fn new(bytes: &'a [u8]) -> Result<Self, JpegError> {
        // Pillow also requires a marker right after the start.
        if !bytes.starts_with(&[0xff, START_OF_IMAGE, 0xff]) {
            return Err(JpegError::Damaged("the start of the file"));
        }
        Ok(Self {
            bytes,
            at: 2,
            frame: None,
            quantization: [None; 4],
            dc: [const { None }; 4],
            ac: [const { None }; 4],
            restart_interval: 0,
            is_jfif: false,
            adobe_transform: None,
            exif: None,
        })
    }

    /// Reads up to the data of the next scan, or to the end of the image.
    pub(crate) fn next_scan(&mut self) -> Result<Option<Scan>, JpegError> {
        let (marker, at) = next_marker(self.bytes, self.at).ok_or(JpegError::CutOff)?;
        self.at = at;
        self.next_scan_from(marker)
    }

    /// Reads up to the data of the next scan, from the marker and the position at which
    /// [`super::bits::Bits::end`] states that the data of a scan ended.
    pub(crate) fn next_scan_after(
        &mut self,
        (marker, at): (Option<u8>, usize),
    ) -> Result<Option<Scan>, JpegError> {
        self.at = at;
        match marker {
            Some(marker) => self.next_scan_from(marker),
            None => self.next_scan(),
        }
    }

    /// Reads up to the data of the next scan, from `marker` on, which has been consumed.
    fn next_scan_from(&mut self, mut marker: u8) -> Result<Option<Scan>, JpegError> {
        loop {
            match marker {
                0xd0..=0xd7 | 0x01 => {}
                START_OF_IMAGE => return Err(JpegError::Damaged("a second start within the file")),
                END_OF_IMAGE => return Ok(None),
                0xc0..=0xc2 => self.read_frame(marker == 0xc2)?,
                0xc4 => self.read_huffman()?,
                0xda => return self.read_scan().map(Some),
                0xdb => self.read_quantization()?,
                0xdd => self.read_restart_interval()?,
                0xe0..=0xef => self.read_application(marker)?,
                // Comments, the number of lines, and settings of arithmetic coding: libjpeg also
                // skips them.
                0xcc | 0xdc | 0xfe => drop(self.contents()?),
                0xc9..=0xcb | 0xcd..=0xcf => return Err(JpegError::Unsupported("arithmetic coding")),
                0xc3 | 0xc5..=0xc7 => return Err(JpegError::Unsupported("lossless or hierarchical coding")),
                _ => return Err(JpegError::Damaged("an unknown marker")),
            }
            (marker, self.at) = next_marker(self.bytes, self.at).ok_or(JpegError::CutOff)?;
        }
    }

    /// Reads a segment, from its length on, and returns its contents.
    fn contents(&mut self) -> Result<&'a [u8], JpegError> {
        let rest = self.bytes.get(self.at..).ok_or(JpegError::CutOff)?;
        let (len, _) = rest.split_first_chunk::<2>().ok_or(JpegError::CutOff)?;
        let len = usize::from(u16::from_be_bytes(*len));
        let contents = rest.get(2..len.max(2)).ok_or(JpegError::CutOff)?;
        if len < 2 {
            return Err(JpegError::Damaged("the length of a segment"));
        }
        self.at += len;
        Ok(contents)
    }

    fn read_frame(&mut self, progressive: bool) -> Result<(), JpegError> {
        const DAMAGED: JpegError = JpegError::Damaged("the frame header");
        let contents = self.contents()?;
        let ([precision, height_0, height_1, width_0, width_1, n], specs) =
            contents.split_first_chunk::<6>().ok_or(DAMAGED)?;
        let (specs, rest) = specs.as_chunks::<3>();
        if self.frame.is_some() || specs.len() != usize::from(*n) || !rest.is_empty() {
            return Err(DAMAGED);
        }
        if *precision != 8 {
            return Err(JpegError::Unsupported("samples of more than 8 bits"));
        }
        if !matches!(n, 1 | 3 | 4) {
            return Err(JpegError::Unsupported("a number of channels other than one, three or four"));
        }
        let mut components = Vec::with_capacity(specs.len());
        for [id, sampling, slot] in specs {
            let [h, v] = [sampling >> 4, sampling & 15].map(usize::from);
            if !(1..=4).contains(&h) || !(1..=4).contains(&v) {
                return Err(DAMAGED);
            }
            // The sampling factors of a single component have no effect: they are relative to other
            // components.
            let [h, v] = if *n == 1 { [1, 1] } else { [h, v] };
            components.push(Component {
                id: *id,
                h,
                v,
                quantization_slot: usize::from(*slot),
                quantization: None,
            });
        }
        let frame = Frame {
            width_px: u32::from(u16::from_be_bytes([*width_0, *width_1])),
            height_px: u32::from(u16::from_be_bytes([*height_0, *height_1])),
            progressive,
            components,
        };
        let [max_h, max_v] = frame.max_sampling();
        if frame.components.iter().any(|component| max_h % component.h + max_v % component.v > 0) {
            return Err(JpegError::Unsupported("fractional chroma subsampling"));
        }
        self.frame = Some(frame);
        Ok(())
    }

    fn read_huffman(&mut self) -> Result<(), JpegError> {
        const DAMAGED: JpegError = JpegError::Damaged("a Huffman table");
        let mut contents = self.contents()?;
        while contents.len() > 16 {
            let ([slot, counts @ ..], rest) = contents.split_first_chunk::<17>().ok_or(DAMAGED)?;
            let n: usize = counts.iter().map(|count| usize::from(*count)).sum();
            if n > 256 || n > rest.len() {
                return Err(DAMAGED);
            }
            let mut definition = Definition { counts: [0; 16], symbols: [0; 256] };
            definition.counts.copy_from_slice(counts);
            definition.symbols[..n].copy_from_slice(&rest[..n]);
            let tables = if slot & 0x10 != 0 { &mut self.ac } else { &mut self.dc };
            *tables.get_mut(usize::from(slot & !0x10)).ok_or(DAMAGED)? = Some(definition);
            contents = &rest[n..];
        }
        if contents.is_empty() { Ok(()) } else { Err(DAMAGED) }
    }

    fn read_quantization(&mut self) -> Result<(), JpegError> {
        const DAMAGED: JpegError = JpegError::Damaged("a quantization table");
        let mut contents = self.contents()?;
        while let Some((spec, rest)) = contents.split_first() {
            let width = if spec >> 4 > 0 { 2 } else { 1 };
            let values = rest.get(..64 * width).ok_or(DAMAGED)?;
            let table = self.quantization.get_mut(usize::from(spec & 15)).ok_or(DAMAGED)?.insert([0; 64]);
            for (position, value) in ZIGZAG.iter().zip(values.chunks_exact(width)) {
                table[usize::from(*position)] = value.iter().fold(0, |all, byte| all << 8 | u16::from(*byte));
            }
            contents = &rest[64 * width..];
        }
        Ok(())
    }

    fn read_restart_interval(&mut self) -> Result<(), JpegError> {
        let interval = self.contents()?.try_into().map_err(|_| JpegError::Damaged("the restart interval"))?;
        self.restart_interval = usize::from(u16::from_be_bytes(interval));
        Ok(())
    }

    /// Reads segments of JFIF, EXIF and Adobe; those of other applications are skipped.
    fn read_application(&mut self, marker: u8) -> Result<(), JpegError> {
        let contents = self.contents()?;
        match marker {
            0xe0 => self.is_jfif |= contents.starts_with(b"JFIF\0") && contents.len() >= 14,
            0xe1 => self.exif = self.exif.or(contents.strip_prefix(b"Exif\0\0")),
            0xee => {
                if let Some([b'A', b'd', b'o', b'b', b'e', .., transform]) = contents.first_chunk::<12>() {
                    self.adobe_transform = Some(*transform);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn read_scan(&mut self) -> Result<Scan, JpegError> {
        const DAMAGED: JpegError = JpegError::Damaged("a scan header");
        let contents = self.contents()?;
        let frame = self.frame.as_ref().ok_or(DAMAGED)?;
        let (n, rest) = contents.split_first().ok_or(DAMAGED)?;
        let n = usize::from(*n);
        if !(1..=4).contains(&n) || rest.len() != 2 * n + 3 {
            return Err(DAMAGED);
        }
        let mut components: Vec<ScanComponent> = Vec::with_capacity(n);
        for spec in rest[..2 * n].as_chunks::<2>().0 {
            // Among components with the same identifier, the first one that this scan does not have
            // yet.
            let position = frame.components.iter().enumerate().position(|(index, component)| {
                component.id == spec[0] && components.iter().all(|other| other.index != index)
            });
            let index = position.ok_or(DAMAGED)?;
            let [dc_slot, ac_slot] = [spec[1] >> 4, spec[1] & 15].map(usize::from);
            components.push(ScanComponent { index, dc_slot, ac_slot });
        }
        let [first, last, bits] = [0, 1, 2].map(|i| rest[2 * n + i]);
        let band = [first, last].map(usize::from);
        Ok(Scan { components, band, high: bits >> 4, low: bits & 15, data: self.at })
    }

    /// Returns the frame, once a scan was reached.
    pub(crate) fn frame(&self) -> Result<&Frame, JpegError> {
        self.frame.as_ref().ok_or(JpegError::Damaged("the frame header"))
    }

    /// Copies the current quantization tables to the components of a scan, unless an earlier scan
    /// has done so.
    pub(crate) fn latch_quantization(&mut self, scan: &Scan) -> Result<(), JpegError> {
        const DAMAGED: JpegError = JpegError::Damaged("a quantization table");
        let frame = self.frame.as_mut().ok_or(DAMAGED)?;
        for component in &scan.components {
            let component = &mut frame.components[component.index];
            if component.quantization.is_none() {
                let table = self.quantization.get(component.quantization_slot).copied().flatten();
                component.quantization = Some(table.ok_or(DAMAGED)?);
            }
        }
        Ok(())
    }

    /// Returns the Huffman table of DC coefficients in `slot`. A sequential file without tables
    /// uses the default ones.
    pub(crate) fn dc(&self, slot: usize) -> Result<&Definition, JpegError> {
        self.table(&self.dc, slot, &standard::DC)
    }

    /// Returns the Huffman table of AC coefficients in `slot`.
    pub(crate) fn ac(&self, slot: usize) -> Result<&Definition, JpegError> {
        self.table(&self.ac, slot, &standard::AC)
    }

    /// Returns the Huffman table in `slot` of `tables`, or that of `standard` in a sequential file.
    fn table<'t>(
        &self,
        tables: &'t [Option<Definition>; 4],
        slot: usize,
        standard: &'t [Definition; 2],
    ) -> Result<&'t Definition, JpegError> {
        let is_progressive = self.frame()?.progressive;
        let mut table = tables.get(slot).and_then(Option::as_ref);
        if table.is_none() && !is_progressive {
            table = standard.get(slot);
        }
        table.ok_or(JpegError::Damaged("a Huffman table"))
    }

    /// Returns the color space, by libjpeg's rules.
    pub(crate) fn color_space(&self) -> Result<ColorSpace, JpegError> {
        let ids: Vec<u8> = self.frame()?.components.iter().map(|component| component.id).collect();
        Ok(match (ids.as_slice(), self.adobe_transform) {
            ([_], _) => ColorSpace::Gray,
            ([_, _, _], _) if self.is_jfif => ColorSpace::YCbCr,
            ([_, _, _], Some(0)) => ColorSpace::Rgb,
            ([_, _, _], Some(_)) => ColorSpace::YCbCr,
            ([b'R', b'G', b'B'], None) => ColorSpace::Rgb,
            ([_, _, _], None) => ColorSpace::YCbCr,
            (_, Some(0) | None) => ColorSpace::Cmyk,
            (_, Some(_)) => ColorSpace::Ycck,
        })
    }

    /// Returns the EXIF data, from its TIFF header on.
    pub(crate) fn exif(&self) -> Option<&'a [u8]> {
        self.exif
    }
}
