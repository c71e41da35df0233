// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"strings"
)

// style is how somebody lays out an object.
type style struct {
	newline string // "" : all of it in one line
	base    string // the indentation of the line that closes it
	unit    string // of its keys beyond that
	colon   string // what stands behind a colon
	comma   string // what stands behind a comma within a line
	pad     string // what stands inside the braces of one line
}

// mostInline is how long a list within an object of many lines may be, in bytes,
// to stay in one of them.
const mostInline = 80

// styleOf sees how an object is laid out.
func styleOf(doc []byte, object span) style {
	s := style{colon: " ", comma: " "}
	all := parts(doc, object)
	if len(all) == 0 {
		return s
	}
	s.colon = withoutBreak(behind(doc, all[0].to, all[1].from, ':'))
	s.comma = s.colon
	child, broken := "", false
	before := object.from + 1
	for i := 0; i < len(all) && !broken; i += 2 {
		gap := string(doc[before:all[i].from])
		if i > 0 {
			gap = behind(doc, before, all[i].from, ',')
		}
		if broken = strings.Contains(gap, "\n"); broken {
			s.newline, child = lastLine(gap)
		} else if i == 0 {
			s.pad = gap
		} else {
			s.comma = gap
		}
		before = all[i+1].to
	}
	if !broken {
		return s
	}
	s.pad, s.comma = "", " "
	closing := string(doc[all[len(all)-1].to : object.to-1])
	if strings.Contains(closing, "\n") {
		_, s.base = lastLine(closing)
	} else {
		s.base = indentation(doc, object.from)
	}
	s.unit = "  "
	if strings.Contains(child, "\t") {
		s.unit = "\t"
	}
	if more, ok := strings.CutPrefix(child, s.base); ok && more != "" {
		s.unit = more
	}
	return s
}

// behind is the text between two places that follows a mark there.
func behind(doc []byte, from, to int, mark byte) string {
	return string(doc[from+bytes.IndexByte(doc[from:to], mark)+1 : to])
}

func withoutBreak(gap string) string {
	if strings.ContainsAny(gap, "\r\n") {
		return " "
	}
	return gap
}

// lastLine parts white space into its kind of line break and what the last line
// begins with.
func lastLine(gap string) (newline, indent string) {
	at := strings.LastIndexByte(gap, '\n')
	newline = "\n"
	if strings.HasSuffix(gap[:at], "\r") {
		newline = "\r\n"
	}
	return newline, gap[at+1:]
}

// indentation is the white space that the line of a place begins with.
func indentation(doc []byte, at int) string {
	line := doc[bytes.LastIndexByte(doc[:at], '\n')+1 : at]
	return string(line[:len(line)-len(bytes.TrimLeft(line, " \t"))])
}

// layOut writes a JSON value in the style. Its tokens stay as they are.
func (s style) layOut(value []byte) []byte {
	var b bytes.Buffer
	s.write(&b, value, 0)
	return b.Bytes()
}

func (s style) write(b *bytes.Buffer, value []byte, depth int) {
	all := whole(value)
	if c := value[all.from]; c != '{' && c != '[' {
		b.Write(all.in(value))
		return
	}
	var line bytes.Buffer
	s.inline(&line, value, all)
	if s.newline == "" || depth > 0 && line.Len() <= mostInline {
		b.Write(line.Bytes())
		return
	}
	items := parts(value, all)
	step := 1 + btoi(value[all.from] == '{')
	b.WriteByte(value[all.from])
	for i := 0; i < len(items); i += step {
		if i > 0 {
			b.WriteByte(',')
		}
		s.breakLine(b, depth+1)
		if step == 2 {
			b.Write(items[i].in(value))
			b.WriteString(":" + s.colon)
		}
		s.write(b, items[i+step-1].in(value), depth+1)
	}
	s.breakLine(b, depth)
	b.WriteByte(value[all.to-1])
}

func (s style) breakLine(b *bytes.Buffer, depth int) {
	b.WriteString(s.newline + s.base + strings.Repeat(s.unit, depth))
}

func (s style) inline(b *bytes.Buffer, value []byte, of span) {
	if c := value[of.from]; c != '{' && c != '[' {
		b.Write(of.in(value))
		return
	}
	object, pad := value[of.from] == '{', ""
	items := parts(value, of)
	if object && len(items) > 0 {
		pad = s.pad
	}
	b.WriteByte(value[of.from])
	b.WriteString(pad)
	for i, item := range items {
		switch {
		case i == 0:
		case object && i%2 == 1:
			b.WriteString(":" + s.colon)
		default:
			b.WriteString("," + s.comma)
		}
		s.inline(b, value, item)
	}
	b.WriteString(pad)
	b.WriteByte(value[of.to-1])
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}
