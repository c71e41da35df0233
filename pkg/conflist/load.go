// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// mostBytes is how large a file may be, in bytes: larger ones are not read.
const mostBytes = 1 << 20

// loaded is a configuration list as libcni reads its text (CNI spec, section
// "Configuration format").
type loaded struct {
	name, cniVersion string
	plugins          []types.PluginConf
}

// ours returns which of the plugins are entries of ours.
func (l loaded) ours() []int {
	var at []int
	for i, p := range l.plugins {
		if p.Type == config.PluginType {
			at = append(at, i)
		}
	}
	return at
}

// parseList reads the text of a list, by the rules of libcni: keys in their own
// letter case, the last of a key that comes twice, booleans in strings too. It
// has no plugins where the text has no such key.
func parseList(doc []byte) (loaded, error) {
	var l loaded
	var values map[string]json.RawMessage
	if err := object(doc, &values); err != nil {
		return l, err
	}
	var versions []string
	for _, key := range []struct {
		name string
		to   any
	}{{"name", &l.name}, {"cniVersion", &l.cniVersion}, {"cniVersions", &versions}} {
		if err := member(values, key.name, key.to); err != nil {
			return l, err
		}
	}
	if _, there := values["name"]; !there {
		return l, errors.New("name: is missing; write the network's")
	}
	highest, err := highestVersion(l.cniVersion, versions)
	if err != nil {
		return l, err
	}
	l.cniVersion = highest
	inline := false
	for _, key := range []string{"disableCheck", "disableGC", "loadOnlyInlinedPlugins"} {
		if inline, err = looseBoolean(values, key); err != nil {
			return l, err
		}
	}
	var plugins []json.RawMessage
	if err := member(values, "plugins", &plugins); err != nil {
		return l, err
	}
	_, there := values["plugins"]
	if len(plugins) == 0 && (there || inline) {
		return l, errors.New("plugins: is empty or missing; write a list of plugin configurations")
	}
	for i, doc := range plugins {
		p, err := parseSingle(doc)
		if err != nil {
			return l, fmt.Errorf("plugins[%d]: %w", i, err)
		}
		l.plugins = append(l.plugins, p)
	}
	return l, nil
}

// member reads the value of a key that may be absent. A null is a mistake.
func member(values map[string]json.RawMessage, key string, to any) error {
	value, there := values[key]
	if !there {
		return nil
	}
	err := json.Unmarshal(value, to)
	if err == nil && string(value) == "null" {
		err = errors.New("null")
	}
	if err != nil {
		return fmt.Errorf("%s: write what the CNI specification has there: %s", key, policy.Printable(err.Error()))
	}
	return nil
}

func looseBoolean(values map[string]json.RawMessage, key string) (bool, error) {
	var v any
	if err := member(values, key, &v); err != nil || v == nil {
		return false, err
	}
	s := strings.ToLower(fmt.Sprint(v))
	switch v.(type) {
	case bool, string:
		if s == "true" || s == "false" {
			return s == "true", nil
		}
	}
	return false, fmt.Errorf("%s: write true or false", key)
}

// highestVersion chooses of cniVersion and cniVersions, where there are any, the
// highest that libcni knows.
func highestVersion(stated string, versions []string) (string, error) {
	if len(versions) == 0 {
		return stated, nil
	}
	if stated != "" {
		versions = append(versions, stated)
	}
	highest := ""
	for _, v := range versions {
		tooHigh, err := version.GreaterThan(v, version.Current())
		if err != nil || v == "" {
			return "", fmt.Errorf("cniVersions: %s is not a version; write one such as 1.0.0", policy.Quote(v))
		}
		above, err := version.GreaterThan(v, highest)
		if !tooHigh && (highest == "" || err == nil && above) {
			highest = v
		}
	}
	return cmp.Or(highest, stated), nil
}

// parseSingle reads one plugin's configuration. Like libcni it matches keys in
// any letter case, after they have gone through Go's own form of JSON, which is
// sorted: where there are both type and Type, the one in small letters counts.
func parseSingle(doc []byte) (types.PluginConf, error) {
	var conf types.PluginConf
	var values map[string]any
	if err := object(doc, &values); err != nil {
		return conf, err
	}
	sorted, err := json.Marshal(values)
	if err != nil {
		return conf, fmt.Errorf("encode: %s", policy.Printable(err.Error()))
	}
	for _, form := range [][]byte{doc, sorted} {
		if err := json.Unmarshal(form, &conf); err != nil {
			return conf, fmt.Errorf("write what the CNI specification has there: %s", policy.Printable(err.Error()))
		}
	}
	if conf.Type == "" {
		return conf, errors.New(`type: is missing; write the name of a plugin, such as "bridge"`)
	}
	return conf, nil
}

// object reads a text that has to be a JSON object.
func object(doc []byte, to any) error {
	if err := isText(doc); err != nil {
		return err
	}
	if doc[whole(doc).from] != '{' {
		return errors.New("is not an object; write one, in braces")
	}
	if err := json.Unmarshal(doc, to); err != nil {
		return fmt.Errorf("%w: %s", config.ErrNotJSON, policy.Printable(err.Error()))
	}
	return nil
}

// isText refuses what is no JSON text, and says where it ceases to be one.
func isText(doc []byte) error {
	if len(doc) > mostBytes {
		return fmt.Errorf("is larger than %d KiB", mostBytes>>10)
	}
	if bytes.HasPrefix(doc, []byte("\ufeff")) {
		return fmt.Errorf("%w: it begins with a byte order mark; save it without", config.ErrNotJSON)
	}
	var text json.RawMessage
	var syntax *json.SyntaxError
	err := json.Unmarshal(doc, &text)
	switch {
	case len(bytes.TrimSpace(doc)) == 0:
		return fmt.Errorf("%w: it is empty", config.ErrNotJSON)
	case errors.As(err, &syntax):
		before := doc[:max(0, min(int(syntax.Offset), len(doc))-1)]
		line := 1 + bytes.Count(before, []byte("\n"))
		column := len(before) - bytes.LastIndexByte(before, '\n')
		return fmt.Errorf("%w: line %d, column %d: %s", config.ErrNotJSON, line, column, policy.Printable(err.Error()))
	case err != nil:
		return fmt.Errorf("%w: %s", config.ErrNotJSON, policy.Printable(err.Error()))
	}
	return nil
}

// loads reports, as an error, that no runtime would load a file of this name
// with this text.
func loads(path string, doc []byte) error {
	if !isListFile(path) {
		_, err := parseSingle(doc)
		return err
	}
	l, err := parseList(doc)
	if err == nil && len(l.plugins) == 0 { // we write no list that needs a folder
		err = errors.New("plugins: is missing; write a list of plugin configurations")
	}
	return err
}

// isListFile tells by a file's name, as runtimes do, that it has to hold a list
// and not a single plugin's configuration.
func isListFile(path string) bool { return filepath.Ext(path) == ".conflist" }
