// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Kind is the type of a JSON value, as messages name it.
type Kind string

// The types of JSON values.
const (
	String  Kind = "a string"
	Number  Kind = "a number"
	Boolean Kind = "a boolean"
	List    Kind = "a list"
	Object  Kind = "an object"
	Null    Kind = "no value"
)

// KindOf returns the type of a valid JSON value.
func KindOf(value json.RawMessage) Kind {
	switch value[0] {
	case '"':
		return String
	case 't', 'f':
		return Boolean
	case '[':
		return List
	case '{':
		return Object
	case 'n':
		return Null
	}
	return Number
}

// stringValue returns a JSON string as Go has it. Half a surrogate pair becomes U+FFFD.
func stringValue(value json.RawMessage) (s string, isString bool) {
	if KindOf(value) != String {
		return "", false
	}
	if bytes.IndexByte(value, '\\') < 0 && utf8.Valid(value) {
		return string(value[1 : len(value)-1]), true
	}
	return s, json.Unmarshal(value, &s) == nil
}

// Value reads the value of a key.
type Value struct {
	Kind Kind
	// Read stores a JSON value and records its mistakes in the document.
	Read func(d *Document, key string, value json.RawMessage)
	Text func() string // the stored value as a flag takes it, "" for none
}

// after returns a value that reads what change makes of the JSON value. It ignores nil.
func (v Value) after(change func(json.RawMessage) json.RawMessage) Value {
	read := v.Read
	v.Read = func(d *Document, key string, value json.RawMessage) {
		if value = change(value); value != nil {
			read(d, key, value)
		}
	}
	return v
}

// fromFlag returns the text of a flag as JSON.
func (v Value) fromFlag(text string) (json.RawMessage, error) {
	switch v.Kind {
	case Boolean:
		b, err := strconv.ParseBool(text) // as the agents parse theirs
		if err != nil {
			return nil, errors.New("is neither true nor false; write one of them")
		}
		return json.Marshal(b)
	case Number:
		n, err := strconv.Atoi(text)
		if err != nil {
			return nil, errors.New("is not a whole number; write one")
		}
		return json.Marshal(n)
	case List:
		items := []string{}
		if strings.TrimSpace(text) != "" {
			for item := range strings.SplitSeq(text, ",") {
				items = append(items, strings.TrimSpace(item))
			}
		}
		return json.Marshal(items)
	}
	return json.Marshal(text)
}

// wrongKind records a value whose type the key or the list does not allow.
func (d *Document) wrongKind(key string, index int, value json.RawMessage, write string) {
	found := "is " + string(KindOf(value)) + "; write " + write
	switch {
	case KindOf(value) == Null && index >= 0:
		found += ", or drop the item"
	case KindOf(value) == Null:
		found += ", or leave the key out"
	}
	if s, isString := stringValue(value); isString {
		// Its quotes are the mistake, so the message shows them.
		d.Fail(key, index, "", policy.Quote(s)+" "+found)
		return
	}
	d.Fail(key, index, start(value), found)
}

// start copies the start of a value: an error does not keep the document in memory.
func start(value json.RawMessage) string { return string(value[:min(len(value), maxValueBytes)]) }

// boolean reads true or false.
func boolean(to *bool) Value {
	return Value{Boolean, readBoolean(func(b bool) { *to = b }), textOf(&to)}
}

// optional reads a boolean that a source may leave out.
func optional(to **bool) Value {
	return Value{Boolean, readBoolean(func(b bool) { *to = &b }), textOf(to)}
}

func textOf[T any](stored **T) func() string {
	return func() string {
		if *stored == nil {
			return ""
		}
		return fmt.Sprint(**stored)
	}
}

func readBoolean(store func(bool)) func(*Document, string, json.RawMessage) {
	return func(d *Document, key string, value json.RawMessage) {
		s, isString := stringValue(value)
		switch {
		case KindOf(value) == Boolean:
			store(value[0] == 't')
		case strings.EqualFold(s, "true") || strings.EqualFold(s, "false"):
			d.wrongKind(key, -1, value, strings.ToLower(s)+" without quotes")
		case isString:
			d.wrongKind(key, -1, value, "true or false, without quotes")
		default:
			d.wrongKind(key, -1, value, "true or false")
		}
	}
}

// text reads a string with parse, which accepts the example.
func text[T any](to *T, example string, parse func(string) (T, error)) Value {
	read := func(d *Document, key string, value json.RawMessage) {
		s, isString := stringValue(value)
		if !isString {
			d.wrongKind(key, -1, value, asString(value, example, parse))
			return
		}
		v, err := parse(s)
		if err != nil {
			d.Fail(key, -1, s, err.Error())
			return
		}
		*to = v
	}
	return Value{String, read, textOf(&to)}
}

// optionalText reads a string that a source may leave out.
func optionalText[T any](to **T, example string, parse func(string) (T, error)) Value {
	v := text(to, example, func(s string) (*T, error) {
		parsed, err := parse(s)
		return &parsed, err
	})
	v.Text = textOf(to)
	return v
}

// asString says how to write a string in place of a value that is none.
func asString[T any](value json.RawMessage, example string, parse func(string) (T, error)) string {
	if KindOf(value) == Number {
		if v, err := parse(string(value)); err == nil {
			return "it in quotes: " + policy.Quote(fmt.Sprint(v)) // of a mask the hexadecimal form, which YAML takes for a number
		}
	}
	return "a string such as " + policy.Quote(example)
}

// anyText accepts any string: it is validated once the document is read.
func anyText[T ~string](s string) (T, error) { return T(s), nil }

// list reads a list of strings with parse, without repeated items. An empty list is not nil.
func list[T comparable](to *[]T, example string, parse func(string) (T, error)) Value {
	read := func(d *Document, key string, value json.RawMessage) {
		if KindOf(value) != List {
			d.wrongKind(key, -1, value, asList(value, example, parse))
			return
		}
		items := elements(value)
		if len(items) > policy.MaxCIDRLimit {
			d.Fail(key, -1, "", fmt.Sprintf("has %d items, more than the %d possible; remove some", len(items), policy.MaxCIDRLimit))
			return
		}
		kept := make([]T, 0, len(items))
		indexes := make([]int, 0, len(items))
		seen := make(map[T]bool, len(items))
		for i, item := range items {
			if len(d.Mistakes) >= maxMistakes {
				break
			}
			s, isString := stringValue(item)
			if !isString {
				d.wrongKind(key, i, item, asString(item, example, parse))
				continue
			}
			v, err := parse(s)
			if err != nil {
				d.Fail(key, i, s, err.Error())
			} else if !seen[v] {
				seen[v] = true
				kept, indexes = append(kept, v), append(indexes, i)
			}
		}
		*to = kept
		position := d.Positions[key]
		position.Indexes = indexes
		d.Positions[key] = position
	}
	return Value{List, read, func() string {
		text := fmt.Sprint(*to) // [a b]
		return strings.ReplaceAll(text[1:len(text)-1], " ", ",")
	}}
}

// asList says how to write a list in place of a value that is none.
func asList[T any](value json.RawMessage, example string, parse func(string) (T, error)) string {
	if KindOf(value) == Null {
		return "[] for none"
	}
	if s, isString := stringValue(value); isString {
		if _, err := parse(s); err == nil {
			return "a list: [" + policy.Quote(s) + "]"
		}
	}
	return "a list such as [" + policy.Quote(example) + "]"
}

// count reads a whole number within limits.
func count(to *int, least, most int) Value {
	limits := fmt.Sprintf("a whole number from %d to %d", least, most)
	return Value{Number, func(d *Document, key string, value json.RawMessage) {
		s, _ := stringValue(value)
		_, notNumber := strconv.Atoi(s)
		n, err := strconv.Atoi(string(value))
		switch {
		case notNumber == nil:
			d.wrongKind(key, -1, value, "it without quotes")
		case KindOf(value) != Number:
			d.wrongKind(key, -1, value, limits)
		case err != nil || n < least || n > most:
			d.Fail(key, -1, start(value), "is not "+limits+"; write one")
		default:
			*to = n
		}
	}, func() string { return strings.TrimPrefix(strconv.Itoa(*to), "0") }} // "" for none
}

// Interval reads a duration of at least a second, such as "1m30s", or whole seconds.
func Interval(to *time.Duration) Value {
	v := text(to, "60s", parseInterval).after(func(value json.RawMessage) json.RawMessage {
		if KindOf(value) == Number {
			return json.RawMessage(policy.Quote(start(value)))
		}
		return value
	})
	v.Text = func() string { return strings.Replace(to.String(), "m0s", "m", 1) }
	return v
}

func parseInterval(s string) (time.Duration, error) {
	const least = time.Second
	number := s
	if _, err := strconv.Atoi(s); err == nil {
		number += "s"
	}
	d, err := time.ParseDuration(number)
	switch {
	case s == "":
		return 0, errors.New("is empty; write an interval such as 60s, or leave the key out")
	case err != nil:
		return 0, errors.New("is not an interval; write seconds, such as 60, or a number with its unit: 60s, 2m")
	case d < least:
		return 0, fmt.Errorf("is shorter than an interval can be; write %s or more", least)
	}
	return d, nil
}

// directory reads an absolute path. Repeated slashes and one at the end mean nothing.
func directory(to *string, example string) Value { return text(to, example, pathLike(example)) }

// dataDirectory reads the path of a dataDir, which a rule's comment has to hold: xt_comment takes 255 bytes.
func dataDirectory(to *string) Value {
	const most, marks = 200, "/._-+@"
	return text(to, DefaultDataDir, func(s string) (string, error) {
		clean, err := pathLike(DefaultDataDir)(s)
		special := strings.IndexFunc(clean, func(r rune) bool { return !alphanumeric(r) && !strings.ContainsRune(marks, r) })
		switch {
		case err != nil:
			return "", err
		case special >= 0:
			r, _ := utf8.DecodeRuneInString(clean[special:])
			return "", fmt.Errorf("holds %q; write a path of letters, digits and %s, such as %s", string(r), marks, DefaultDataDir)
		case len(clean) > most:
			return "", fmt.Errorf("has %d bytes; write a path of at most %d", len(clean), most)
		}
		return clean, nil
	})
}

// pathLike parses the path of a directory. Messages give the example.
func pathLike(example string) func(string) (string, error) {
	return func(s string) (string, error) {
		unprintable := func(r rune) bool { return !strconv.IsPrint(r) || r == '\uFFFD' }
		switch clean := filepath.Clean(s); {
		case s == "":
			return "", fmt.Errorf("is empty; write an absolute path such as %s, or leave the key out", example)
		case strings.ContainsFunc(s, unprintable):
			return "", fmt.Errorf("holds characters that cannot be printed; write a path such as %s", example)
		case !filepath.IsAbs(s):
			return "", fmt.Errorf("is relative; write an absolute path such as %s", example)
		case clean == "/":
			return "", fmt.Errorf("is the root directory; write a directory such as %s", example)
		case strings.Contains(s+"/", "/./") || strings.Contains(s+"/", "/../"):
			return "", fmt.Errorf("is not the shortest way to write this path; did you mean %s?", policy.Quote(clean))
		default:
			return clean, nil
		}
	}
}

// networkName reads the name of a network. A null counts as a missing name.
func networkName(to *string) Value {
	return text(to, "podnet", parseNetworkName).after(func(value json.RawMessage) json.RawMessage {
		if KindOf(value) == Null {
			return nil
		}
		return value
	})
}

// requireName records that a document does not name its network.
func (d *Document) requireName(network string) {
	if network == "" && !d.Flawed["name"] {
		d.Fail("name", -1, "", `is missing; name the network, such as "podnet"`)
	}
}

func alphanumeric(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
}

// parseNetworkName accepts what the CNI spec does (section "Network configuration objects").
func parseNetworkName(s string) (string, error) {
	if s == "" {
		return "", errors.New(`is empty; name the network, such as "podnet"`)
	}
	for i, r := range s {
		if !alphanumeric(r) && (i == 0 || !strings.ContainsRune("_.-", r)) {
			return "", errors.New("is not the name of a network; write letters, digits, '_', '.' and '-', " +
				"the first a letter or a digit")
		}
	}
	return s, nil
}

// orEmpty accepts "" too.
func orEmpty(parse func(string) (string, error)) func(string) (string, error) {
	return func(s string) (string, error) {
		if s == "" {
			return "", nil
		}
		return parse(s)
	}
}

// oneOf reads one of the choices.
func oneOf(to policy.Word) Value {
	return Value{String, func(d *Document, key string, value json.RawMessage) {
		s, isString := stringValue(value)
		if !isString {
			quoted := `"` + strings.Join(to.Choices(), `"|"`) + `"`
			d.wrongKind(key, -1, value, policy.JoinOr(strings.Split(quoted, "|")))
		} else if err := to.Set(s); err != nil {
			d.Fail(key, -1, s, err.Error())
		}
	}, to.String}
}

// parseListen accepts HOST:PORT. The host may be empty, and the port 0.
func parseListen(s string) (string, error) {
	host, port, err := net.SplitHostPort(s)
	_, portErr := strconv.ParseUint(port, 10, 16)
	address, zone, _ := strings.Cut(host, "%")
	notInHostName := func(r rune) bool { return !alphanumeric(r) && !strings.ContainsRune("-._", r) }
	if err != nil || portErr != nil || net.ParseIP(address) == nil && (zone != "" || strings.ContainsFunc(host, notInHostName)) {
		return "", errors.New(`is not an address to listen on; write HOST:PORT such as 127.0.0.1:19820 or [::1]:19820, or "" for off`)
	}
	return s, nil
}
