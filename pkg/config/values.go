// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"path/filepath"
	"reflect"
	"slices"
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

// StringValue returns the string that a JSON value is. Half a surrogate pair becomes U+FFFD.
func StringValue(value json.RawMessage) (s string, isString bool) {
	if KindOf(value) != String {
		return "", false
	}
	if bytes.IndexByte(value, '\\') < 0 && utf8.Valid(value) {
		return string(value[1 : len(value)-1]), true
	}
	return s, json.Unmarshal(value, &s) == nil
}

// Value reads and writes the value of a key.
type Value struct {
	Kind Kind
	// Read stores a JSON value and records its mistakes in the document.
	Read func(d *Document, key string, value json.RawMessage)
	Text func() string // the stored value as a flag takes it; "" for none
}

// fromFlag writes the text of a flag as JSON, or returns what is wrong with it.
func (v Value) fromFlag(text string) (value any, problem string) {
	switch v.Kind {
	case Boolean:
		b, err := strconv.ParseBool(text) // as the agents parse theirs
		if err != nil {
			return nil, "is neither true nor false; write one of them"
		}
		return b, ""
	case Number:
		n, err := strconv.Atoi(text)
		if err != nil {
			return nil, "is not a whole number; write one"
		}
		return n, ""
	case List:
		items := []string{}
		if strings.TrimSpace(text) != "" {
			for item := range strings.SplitSeq(text, ",") {
				items = append(items, strings.TrimSpace(item))
			}
		}
		return items, ""
	}
	return text, ""
}

// wrongKind records a value whose type the key or the list does not allow.
func (d *Document) wrongKind(key string, index int, value json.RawMessage, write string) {
	found := "is " + string(KindOf(value)) + "; write " + write
	if s, isString := StringValue(value); isString {
		// Its quotes are the mistake, so the message shows them.
		d.Fail(key, index, "", policy.Quote(s)+" "+found)
		return
	}
	// A copy of the start: the error does not keep the document in memory.
	d.Fail(key, index, string(value[:min(len(value), maxValueBytes)]), found)
}

// orElse returns the other remedy for a null.
func orElse(value json.RawMessage, remedy string) string {
	if KindOf(value) == Null {
		return ", or " + remedy
	}
	return ""
}

// boolean reads true or false.
func boolean(to *bool) Value {
	return Value{Boolean, readBoolean(func(b bool) { *to = b }), shown(to)}
}

// optional reads a boolean that a source may leave out.
func optional(to **bool) Value {
	return Value{Boolean, readBoolean(func(b bool) { *to = &b }), func() string {
		if *to == nil {
			return ""
		}
		return strconv.FormatBool(**to)
	}}
}

func readBoolean(store func(bool)) func(*Document, string, json.RawMessage) {
	return func(d *Document, key string, value json.RawMessage) {
		s, _ := StringValue(value)
		switch {
		case KindOf(value) == Boolean:
			store(value[0] == 't')
		case strings.EqualFold(s, "true") || strings.EqualFold(s, "false"):
			d.wrongKind(key, -1, value, strings.ToLower(s)+" without quotes")
		case KindOf(value) == String:
			d.wrongKind(key, -1, value, "true or false, without quotes")
		default:
			d.wrongKind(key, -1, value, "true or false"+orElse(value, "leave the key out"))
		}
	}
}

// shown returns a function that formats a stored value, "" for the zero value.
func shown[T any](to *T) func() string {
	return func() string {
		if v := reflect.ValueOf(to).Elem(); v.IsZero() && v.Kind() != reflect.Bool {
			return ""
		}
		return fmt.Sprint(*to)
	}
}

// text reads a string with parse, which accepts the example.
func text[T any](to *T, example string, parse func(string) (T, error)) Value {
	read := func(d *Document, key string, value json.RawMessage) {
		s, isString := StringValue(value)
		if !isString {
			d.wrongKind(key, -1, value, asString(value, example, parse)+orElse(value, "leave the key out"))
			return
		}
		v, err := parse(s)
		if err != nil {
			d.Fail(key, -1, s, err.Error())
			return
		}
		*to = v
	}
	return Value{String, read, shown(to)}
}

// asString says how to write a string in place of a value that is none.
func asString[T any](value json.RawMessage, example string, parse func(string) (T, error)) string {
	if KindOf(value) == Number {
		if _, err := parse(string(value)); err == nil {
			return "it in quotes: " + policy.Quote(string(value))
		}
	}
	return "a string such as " + policy.Quote(example)
}

// anyText accepts any string: it is validated once the document is read.
func anyText[T ~string](s string) (T, error) { return T(s), nil }

// list reads a list of strings with parse. A repeated item is dropped. The list is not nil:
// an empty list differs from none.
func list[T comparable](to *[]T, example string, parse func(string) (T, error)) Value {
	read := func(d *Document, key string, value json.RawMessage) {
		if KindOf(value) != List {
			d.wrongKind(key, -1, value, asList(value, example, parse))
			return
		}
		items := Elements(value)
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
			s, isString := StringValue(item)
			if !isString {
				d.wrongKind(key, i, item, asString(item, example, parse)+orElse(item, "drop the item"))
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
		if d.Indexes == nil {
			d.Indexes = map[string][]int{}
		}
		d.Indexes[key] = indexes
	}
	return Value{List, read, func() string {
		items := make([]string, len(*to))
		for i, item := range *to {
			items[i] = fmt.Sprint(item)
		}
		return strings.Join(items, ",")
	}}
}

// asList says how to write a list in place of a value that is none.
func asList[T any](value json.RawMessage, example string, parse func(string) (T, error)) string {
	if KindOf(value) == Null {
		return "[] for none, or leave the key out"
	}
	if s, isString := StringValue(value); isString {
		if _, err := parse(s); err == nil {
			return "a list: [" + policy.Quote(s) + "]"
		}
	}
	return "a list such as [" + policy.Quote(example) + "]"
}

// count reads a whole number within limits.
func count(to *int, least, most int) Value {
	read := func(d *Document, key string, value json.RawMessage) {
		s, isString := StringValue(value)
		if _, err := strconv.Atoi(s); isString && err == nil {
			d.wrongKind(key, -1, value, "it without quotes")
			return
		}
		if KindOf(value) != Number {
			d.wrongKind(key, -1, value, fmt.Sprintf("a whole number from %d to %d", least, most)+orElse(value, "leave the key out"))
			return
		}
		n, err := strconv.Atoi(string(value))
		if err != nil || n < least || n > most {
			d.Fail(key, -1, string(value[:min(len(value), maxValueBytes)]),
				fmt.Sprintf("is not a whole number from %d to %d; write one", least, most))
			return
		}
		*to = n
	}
	return Value{Number, read, shown(to)}
}

// Interval reads a duration of at least a second: a text such as "60s" or "1m30s"
// (time.ParseDuration), or whole seconds, with or without quotes.
func Interval(to *time.Duration) Value {
	v := text(to, "60s", parseInterval)
	readText := v.Read
	v.Read = func(d *Document, key string, value json.RawMessage) {
		if KindOf(value) == Number {
			value = json.RawMessage(policy.Quote(string(value[:min(len(value), maxValueBytes)])))
		}
		readText(d, key, value)
	}
	v.Text = func() string { // 1m, not 1m0s
		text := to.String()
		if strings.HasSuffix(text, "m0s") {
			return strings.TrimSuffix(text, "0s")
		}
		return text
	}
	return v
}

func parseInterval(s string) (time.Duration, error) {
	const least = time.Second
	d, err := time.ParseDuration(s)
	if n, notWhole := strconv.ParseInt(s, 10, 64); notWhole == nil {
		d, err = time.Duration(n)*time.Second, nil
		if n > math.MaxInt64/int64(time.Second) {
			return 0, errors.New("is longer than 290 years; write an interval such as 60s")
		}
		if n < 0 {
			d = 0 // the product may overflow
		}
	}
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

// directory reads an absolute path.
func directory(to *string, example string) Value { return text(to, example, pathLike(example)) }

// maxPath is the kernel's limit on a path (PATH_MAX) less the terminating NUL and the name of
// a file in the directory (NAME_MAX and a slash).
const maxPath = 4096 - 1 - 256

// pathLike parses the path of a directory. Messages give the example.
func pathLike(example string) func(string) (string, error) {
	return func(s string) (string, error) {
		unprintable := func(r rune) bool { return !strconv.IsPrint(r) || r == '\uFFFD' }
		switch clean := filepath.Clean(s); {
		case s == "":
			return "", fmt.Errorf("is empty; write an absolute path such as %s, or leave the key out", example)
		case strings.ContainsFunc(s, unprintable):
			return "", fmt.Errorf("holds characters that cannot be printed; write a path such as %s", example)
		case len(s) > maxPath:
			return "", fmt.Errorf("has %d bytes, more than a path can have; write one of at most %d", len(s), maxPath)
		case !filepath.IsAbs(s):
			return "", fmt.Errorf("is relative; write an absolute path such as %s", example)
		case clean == "/":
			return "", fmt.Errorf("is the root directory; write a directory such as %s", example)
		case clean != s:
			return "", fmt.Errorf("is not the shortest way to write this path; did you mean %s?", policy.Quote(clean))
		}
		return s, nil
	}
}

// networkName reads the name of a network. A null counts as a missing name.
func networkName(to *string) Value {
	v := text(to, "podnet", parseNetworkName)
	readText := v.Read
	v.Read = func(d *Document, key string, value json.RawMessage) {
		if KindOf(value) != Null {
			readText(d, key, value)
		}
	}
	return v
}

func (d *Document) failWithoutName() {
	d.Fail("name", -1, "", `is missing; name the network, such as "podnet"`)
}

func alphanumeric(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
}

// parseNetworkName accepts a letter or digit, followed by letters, digits, '_', '.' and '-'
// (CNI spec, "Network configuration objects").
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

// oneOf reads one of the choices, which a message joins with commas and "or".
func oneOf[T ~string](to *T, choices ...T) Value {
	return text(to, string(choices[0]), func(s string) (T, error) {
		if slices.Contains(choices, T(s)) {
			return T(s), nil
		}
		write := "write " + string(choices[0])
		for i, c := range choices[1:] {
			separator := ", "
			if i == len(choices)-2 {
				separator = " or "
			}
			write += separator + string(c)
		}
		if s == "" {
			return "", errors.New("is empty; " + write + ", or leave the key out")
		}
		return "", errors.New("is not one of the choices; " + write)
	})
}

// parseListen accepts HOST:PORT. An empty host stands for all addresses of the node; the
// kernel chooses a port for 0.
func parseListen(s string) (string, error) {
	const write = `write HOST:PORT such as 127.0.0.1:19820, or "" for off`
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		if _, err := strconv.ParseUint(s, 10, 16); err == nil {
			return "", fmt.Errorf("is a port alone; did you mean 127.0.0.1:%s?", s)
		}
		if strings.Count(s, ":") > 1 {
			return "", errors.New("is not an address to listen on; write IPv6 in brackets, such as [::1]:19820")
		}
		return "", errors.New("is not an address to listen on; " + write)
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return "", errors.New("has no port from 0 to 65535; " + write)
	}
	address, zone, _ := strings.Cut(host, "%")
	notInHostName := func(r rune) bool { return !alphanumeric(r) && !strings.ContainsRune("-._", r) }
	if net.ParseIP(address) == nil && (zone != "" || strings.ContainsFunc(host, notInHostName)) {
		return "", errors.New("has no host that can be listened on; " + write)
	}
	return s, nil
}
