// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// FromConf makes the text of a list of a single plugin's configuration and our
// entry, laid out as the configuration is. The list has the configuration's name
// and CNI version, which the configuration keeps too, as libcni does it
// (ConfListFromConf).
func FromConf(doc, entry []byte) ([]byte, error) {
	const op = "make a conflist of a single plugin's configuration"
	conf, err := parseSingle(doc)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%s: %w", op, err)
	case conf.Type == config.PluginType:
		return nil, fmt.Errorf("%s: %w", op, ErrOnlyPlugin)
	case conf.Name == "":
		return nil, fmt.Errorf("%s: name: is missing; write the network's", op)
	}
	if err := checkEntry(entry, conf.Name, conf.CNIVersion); err != nil {
		return nil, fmt.Errorf("%s: the entry: %w", op, err)
	}
	now, err := listOf(doc, conf.Name, conf.CNIVersion, entry)
	if err == nil {
		err = verifyList(doc, conf, entry, now)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	return now, nil
}

func listOf(doc []byte, name, cniVersion string, entry []byte) ([]byte, error) {
	all := whole(doc)
	s := styleOf(doc, all)
	outer := s
	outer.base = ""
	s.base = strings.Repeat(s.unit, 2)
	conf := shifted(all.in(doc), s.base)
	lineBreak := func(depth int) string { return s.newline + strings.Repeat(s.unit, depth) }
	between := "," + lineBreak(1)
	open, shut := "{"+lineBreak(1), lineBreak(0)+"}"
	if s.newline == "" {
		between, open, shut = ","+s.comma, "{"+s.pad, s.pad+"}"
	}
	var b bytes.Buffer
	b.WriteString(open)
	for _, member := range []struct{ key, value string }{{"name", name}, {"cniVersion", cniVersion}} {
		if member.value == "" { // a version that is absent, as it was
			continue
		}
		quoted, err := quotedJSON(member.value)
		if err != nil {
			return nil, err
		}
		b.WriteString(`"` + member.key + `":` + s.colon + quoted + between)
	}
	b.WriteString(`"plugins":` + s.colon + "[" + lineBreak(2))
	b.Write(conf)
	b.WriteByte(',')
	if s.newline == "" {
		b.WriteString(s.comma)
	}
	b.WriteString(lineBreak(2))
	b.Write(s.layOut(entry))
	b.WriteString(lineBreak(1) + "]" + shut)
	b.Write(doc[all.to:])
	return b.Bytes(), nil
}

// shifted indents all lines of a JSON text but the first and blank ones. No
// string of it can have a line break in it.
func shifted(doc []byte, by string) []byte {
	lines := bytes.SplitAfter(doc, []byte("\n"))
	for i, line := range lines[1:] {
		if len(bytes.TrimSpace(line)) > 0 {
			lines[i+1] = slices.Concat([]byte(by), line)
		}
	}
	return bytes.Join(lines, nil)
}

func quotedJSON(s string) (string, error) {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(s); err != nil {
		return "", fmt.Errorf("encode: %s", policy.Printable(err.Error()))
	}
	return strings.TrimSuffix(b.String(), "\n"), nil
}

// verifyList makes sure that a list is the one that libcni would make of the
// configuration, and our entry behind it.
func verifyList(doc []byte, conf types.PluginConf, entry, now []byte) error {
	_, theirs, own, err := divide(now)
	if err != nil {
		return fmt.Errorf("the outcome cannot be read: %w", err)
	}
	list, err := parseList(now)
	if err != nil {
		return fmt.Errorf("the outcome cannot be read: %w", err)
	}
	wasConf, err := decode(doc)
	if err != nil {
		return err
	}
	wasEntry, err := decode(entry)
	if err != nil {
		return err
	}
	if !reflect.DeepEqual(theirs, []any{wasConf}) || !reflect.DeepEqual(own, []any{wasEntry}) ||
		list.name != conf.Name || list.cniVersion != conf.CNIVersion {
		return errors.New("the outcome is not the configuration and our entry")
	}
	return nil
}

// madeSuffix ends the name of a list that was made of a single plugin's
// configuration. It begins with a byte that sorts before the dot of an extension.
const madeSuffix = "-made-by-ip-masq.conflist"

// ListPath returns the path for the list that is made of a .conf or .json file:
// beside it, sorting before it, and behind every other file that runtimes load
// and that sorts before it, so that the first of the directory stays the first.
func ListPath(conf string) (string, error) {
	dir, name := filepath.Split(conf)
	ext := filepath.Ext(name)
	if ext != ".conf" && ext != ".json" {
		return "", fmt.Errorf("name a conflist for %s: it is neither a .conf nor a .json file", policy.Printable(conf))
	}
	made := strings.TrimSuffix(name, ext) + madeSuffix
	names, err := loadable(filepath.Clean(dir + "."))
	if err != nil {
		return "", err
	}
	for _, other := range names {
		if made < other && other < name {
			return "", fmt.Errorf("name a conflist for %s: %s sorts between it and %s; rename one of the two files",
				policy.Printable(conf), policy.Printable(other), policy.Printable(made))
		}
	}
	return filepath.Join(dir, made), nil
}

// original returns the single plugin's configuration that stands beside a list
// which ListPath named: "" where it is gone.
func original(path string) string {
	stem, made := strings.CutSuffix(path, madeSuffix)
	for _, ext := range []string{".conf", ".json"} {
		if _, err := os.Lstat(stem + ext); made && err == nil {
			return stem + ext
		}
	}
	return ""
}

// isMade tells a list that FromConf and ListPath made: by its name, and because
// its only plugin but ours has the list's name too.
func isMade(path string, list loaded) bool {
	if !strings.HasSuffix(path, madeSuffix) {
		return false
	}
	others := slices.DeleteFunc(slices.Clone(list.plugins), func(p types.PluginConf) bool {
		return p.Type == config.PluginType
	})
	return len(others) == 1 && others[0].Name == list.name
}
