//! A line chart as SVG, both axes by powers of ten.

use std::fmt::Write as _;

use anyhow::Result;

const COLOURS: [&str; 5] = ["#1b6ca8", "#c8553d", "#3b7a57", "#7a5195", "#8a6d00"];
/// Least distance between two names.
const LINE: f64 = 15.0;
const WIDTH: f64 = 680.0;
const HEIGHT: f64 = 400.0;
/// Left, right, top, bottom of what is drawn in.
const FRAME: (f64, f64, f64, f64) = (70.0, 470.0, 50.0, 340.0);

/// A line with its name.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    pub(crate) name: &'static str,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Whole powers of ten that hold every value.
fn decades(values: impl Iterator<Item = f64>) -> (i32, i32) {
    let logs: Vec<f64> = values.filter(|value| *value > 0.0).map(f64::log10).collect();
    let least = logs.iter().copied().fold(f64::INFINITY, f64::min).floor();
    let most = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max).ceil();
    #[expect(clippy::cast_possible_truncation, reason = "exponents of what was measured")]
    if logs.is_empty() { (0, 1) } else { (least as i32, (most as i32).max(least as i32 + 1)) }
}

/// Draws the lines.
pub(crate) fn line_chart(title: &str, x_name: &str, y_name: &str, lines: &[Series]) -> Result<String> {
    let (left, right, top, bottom) = FRAME;
    let points = || lines.iter().flat_map(|line| line.points.iter());
    let (x_from, x_to) = decades(points().map(|(x, _)| *x));
    let (y_from, y_to) = decades(points().map(|(_, y)| *y));
    let x_at = |x: f64| left + (right - left) * (x.log10() - f64::from(x_from)) / f64::from(x_to - x_from);
    let y_at = |y: f64| bottom - (bottom - top) * (y.log10() - f64::from(y_from)) / f64::from(y_to - y_from);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"{left}\" y=\"28\" font-size=\"15\">{title}</text>\n"
    );
    for exponent in x_from..=x_to {
        let (x, label) = (x_at(10_f64.powi(exponent)), decade(exponent));
        writeln!(
            svg,
            "<path d=\"M{x:.1} {top}V{bottom}\" stroke=\"#ddd\"/><text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
            bottom + 18.0
        )?;
    }
    for exponent in y_from..=y_to {
        let (y, label) = (y_at(10_f64.powi(exponent)), decade(exponent));
        writeln!(
            svg,
            "<path d=\"M{left} {y:.1}H{right}\" stroke=\"#ddd\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            left - 8.0,
            y + 4.0
        )?;
    }
    writeln!(
        svg,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{x_name}</text>",
        f64::midpoint(left, right),
        bottom + 40.0
    )?;
    let middle = f64::midpoint(top, bottom);
    writeln!(
        svg,
        "<text transform=\"rotate(-90 18 {middle})\" x=\"18\" y=\"{middle}\" text-anchor=\"middle\">{y_name}</text>"
    )?;
    for (line, colour) in lines.iter().zip(COLOURS.into_iter().cycle()) {
        let corners: Vec<String> =
            line.points.iter().map(|(x, y)| format!("{:.1},{:.1}", x_at(*x), y_at(*y))).collect();
        writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            corners.join(" ")
        )?;
        for (x, y) in &line.points {
            writeln!(
                svg,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"/>",
                x_at(*x),
                y_at(*y)
            )?;
        }
    }
    // Each name stands at its line's end, or above the one that stands there already.
    let ends = lines.iter().zip(COLOURS.into_iter().cycle());
    let mut names: Vec<_> =
        ends.filter_map(|(line, colour)| Some((y_at(line.points.last()?.1), line.name, colour))).collect();
    names.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut lowest = f64::INFINITY;
    for (y, name, colour) in names {
        lowest = y.min(lowest - LINE);
        writeln!(
            svg,
            "<text x=\"{}\" y=\"{:.1}\" fill=\"{colour}\">{name}</text>",
            right + 8.0,
            lowest + 4.0
        )?;
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}

fn decade(exponent: i32) -> String {
    match exponent {
        0..=2 => 10_f64.powi(exponent).to_string(),
        3..=5 => format!("{}k", 10_f64.powi(exponent - 3)),
        6..=8 => format!("{}M", 10_f64.powi(exponent - 6)),
        _ => format!("{}", 10_f64.powi(exponent)),
    }
}
