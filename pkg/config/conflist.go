// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// conflist is a network configuration list (CNI spec, "Configuration format").
type conflist struct {
	network, cniVersion string
	plugins             []plugin
	loadsFolder         bool // further plugins stand in files of their own
}

// plugin is one plugin's configuration.
type plugin struct {
	file string // where it stands
	conf types.PluginConf
	doc  []byte
}

// parseConflist reads a file as libcni does: by its extension a list, or a
// single plugin's configuration that makes a list of one.
func parseConflist(path string, doc []byte) (conflist, error) {
	parse := parseSingle
	if isListFile(path) {
		parse = parseList
	}
	c, err := parse(path, doc)
	if err != nil {
		return c, err
	}
	for i := range c.plugins {
		c.plugins[i].file = path
	}
	return c, nil
}

func parseSingle(path string, doc []byte) (conflist, error) {
	p, err := parsePlugin(doc)
	if err != nil {
		return conflist{}, fmt.Errorf("%s: %w", policy.Printable(path), err)
	}
	return conflist{network: p.conf.Name, cniVersion: p.conf.CNIVersion, plugins: []plugin{p}}, nil
}

// parsePlugin matches keys in any letter case, as libcni and the skeleton of the
// plugins do: it decides by them which plugin runs.
func parsePlugin(doc []byte) (plugin, error) {
	p := plugin{doc: doc}
	if err := unmarshal(doc, &p.conf); err != nil {
		return p, err
	}
	if p.conf.Type != "" {
		return p, nil
	}
	var list struct{ Plugins json.RawMessage }
	if err := json.Unmarshal(doc, &list); err == nil && list.Plugins != nil {
		return p, errors.New("plugins: lists are read from .conflist files alone; rename the file")
	}
	return p, errors.New(`type: is missing; write the name of a plugin, such as "bridge"`)
}

// unmarshal tells what is no JSON from what is JSON of another kind.
func unmarshal(doc []byte, to any) error {
	err := json.Unmarshal(doc, to)
	var wrong *json.UnmarshalTypeError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &wrong) && wrong.Field == "":
		return fmt.Errorf("is %s; write an object, in braces", policy.Printable(wrong.Value))
	case errors.As(err, &wrong):
		return fmt.Errorf("%s: is %s; write what the CNI specification has there", policy.Printable(wrong.Field), policy.Printable(wrong.Value))
	}
	return syntaxError(doc, err)
}

// parseList reads a list. Of a key that comes twice the last counts, as for
// libcni, and unknown ones are nobody's mistake here.
func parseList(path string, doc []byte) (conflist, error) {
	var values map[string]json.RawMessage
	if err := unmarshal(doc, &values); err != nil {
		return conflist{}, fmt.Errorf("%s: %w", policy.Printable(path), err)
	}
	var c conflist
	var versions []string
	f := Document{File: path}
	inline := false
	for _, k := range []Key{
		{"name", needed(networkName(&c.network))},
		{"cniVersion", text("1.0.0", unjudged, func(s string) { c.cniVersion = s })},
		{"cniVersions", list(&versions, "1.0.0", parseVersion)},
		{"disableCheck", looseBoolean(func(bool) {})},
		{"disableGC", looseBoolean(func(bool) {})},
		{"loadOnlyInlinedPlugins", looseBoolean(func(b bool) { inline = b })},
		{"plugins", pluginList(&c.plugins)},
	} {
		if value, there := values[k.Name]; there {
			k.Read(&f, k.Name, value)
		}
	}
	if c.network == "" && !f.Flawed["name"] {
		f.failWithoutName()
	}
	c.cniVersion = highestVersion(c.cniVersion, versions)
	c.loadsFolder = !inline && len(f.Mistakes) == 0
	return c, f.Err()
}

// looseBoolean reads what libcni takes for a boolean of a list: a string too.
func looseBoolean(store func(bool)) reader {
	return func(f *Document, key string, value json.RawMessage) {
		if s, _ := StringValue(value); strings.EqualFold(s, "true") || strings.EqualFold(s, "false") {
			value = json.RawMessage(strings.ToLower(s))
		}
		boolean(store)(f, key, value)
	}
}

func pluginList(to *[]plugin) reader {
	return func(f *Document, key string, value json.RawMessage) {
		if KindOf(value) != List {
			f.wrongKind(key, -1, value, "a list of plugin configurations")
			return
		}
		items := Elements(value)
		if len(items) == 0 {
			f.Fail(key, -1, "", "is empty; write at least one plugin configuration")
		}
		for i, item := range items {
			p, err := parsePlugin(inOrder(item))
			if err != nil {
				f.Note(fmt.Errorf("%s[%d]: %w", key, i, err))
			}
			*to = append(*to, p)
		}
	}
}

// inOrder writes an item of a list as libcni does before it looks at it: with
// its keys in order, which decides where two differ in their letter case alone.
func inOrder(item json.RawMessage) json.RawMessage {
	var values map[string]any
	if json.Unmarshal(item, &values) != nil || values == nil {
		return item
	}
	ordered, err := json.Marshal(values)
	if err != nil {
		return item
	}
	return ordered
}

func parseVersion(s string) (string, error) {
	if _, _, _, err := version.ParseVersion(s); err != nil || s == "" {
		return "", errors.New("is not a version; write one such as 1.0.0")
	}
	return s, nil
}

// highestVersion chooses as libcni does: of cniVersion and cniVersions the
// highest that it knows itself; cniVersion where there is no choice.
func highestVersion(stated string, versions []string) string {
	highest := ""
	for _, v := range append(versions, stated) {
		known, errKnown := version.GreaterThanOrEqualTo(version.Current(), v)
		above, errAbove := version.GreaterThan(v, highest)
		if errKnown == nil && known && (highest == "" || errAbove == nil && above) {
			highest = v
		}
	}
	if highest == "" || len(versions) == 0 {
		return stated
	}
	return highest
}

// entries reads those of the plugins that are ours.
func (c conflist) entries() []ConflistEntry {
	var ours []ConflistEntry
	for i, p := range c.plugins {
		if p.conf.Type != PluginType {
			continue
		}
		e := ConflistEntry{Index: i}
		netconf, err := c.netconf(p)
		if err == nil {
			e.Netconf = ReadNetconf(netconf)
			e.Entry, err = e.Netconf.Entry()
		}
		if err != nil {
			e.Err = fmt.Errorf("%s: plugins[%d]: %w", policy.Printable(p.file), i, err)
		}
		ours = append(ours, e)
	}
	return ours
}

// netconf returns what the plugin is handed: its configuration, with the name
// and the version of the list. It goes through Go's own form of JSON values, as
// in libcni, so what comes out is to the byte what the plugin would read.
func (c conflist) netconf(p plugin) ([]byte, error) {
	var values map[string]any
	if err := unmarshal(p.doc, &values); err != nil {
		return nil, err
	}
	values["name"], values["cniVersion"] = c.network, c.cniVersion
	netconf, err := json.Marshal(values)
	if err != nil {
		return nil, fmt.Errorf("encode the configuration: %s", policy.Printable(err.Error()))
	}
	return netconf, nil
}
