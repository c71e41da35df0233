// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// Default paths of reconciler.toml and of the plugin entry to insert into conflists.
const (
	DefaultReconcilerFile = "/etc/ip-masq/reconciler.toml"
	DefaultEntryFile      = "/etc/ip-masq/entry.json"
)

// Settings are the reconciler's settings.
type Settings struct {
	ResyncInterval time.Duration // at least 1s
	Backend        policy.Backend

	// Directories: absolute and clean. AgentConfigDir is "" if off.
	CNIConfDir, CNIBinDir, AgentConfigDir string
	AgentDialect                          Dialect
	DataDir                               string

	// Addresses, HOST:PORT; "" is off.
	HealthListen, MetricsListen string

	LogFormat string // text or json

	Agent       AgentPolicy
	AgentStated bool // [agent] or one of its flags is given
	Conflist    ConflistSettings

	// Origins has, by key, where a setting is stated: FlagOrigin, or FILE:LINE. Others have their defaults.
	Origins map[string]string
}

// Origins of settings that no file states.
const (
	FlagOrigin    = "flag"
	DefaultOrigin = "default"
)

// Setting is a key of the settings with its value.
type Setting struct {
	Key    string `json:"key"`
	Value  string `json:"value"`  // as its flag takes it; "" for none
	Origin string `json:"origin"` // FILE:LINE, FlagOrigin or DefaultOrigin
}

// ConflistSettings tell whether and how the loop syncs the conflist.
type ConflistSettings struct {
	Manage    bool
	Network   string // "" is the network that the runtime picks
	EntryFile string
}

// DefaultSettings returns the settings without a file and flags.
func DefaultSettings() Settings {
	return Settings{
		ResyncInterval: time.Minute,
		Backend:        policy.Auto,
		CNIConfDir:     DefaultCNIConfDir,
		CNIBinDir:      "/opt/cni/bin",
		AgentDialect:   DialectV1,
		DataDir:        DefaultDataDir,
		HealthListen:   "127.0.0.1:19820",
		LogFormat:      "text",
		Conflist:       ConflistSettings{EntryFile: DefaultEntryFile},
	}
}

// The tables of reconciler.toml.
const agentTable, conflistTable = "agent", "conflist"

// keys is the table of the keys of reconciler.toml, in the order of its documentation.
func (s *Settings) keys() []Key {
	d := DefaultSettings()
	backend := policy.WordOf(&s.Backend, policy.Auto, policy.IPTables, policy.NFTables)
	dialect := policy.WordOf(&s.AgentDialect, DialectV1, DialectV2)
	logFormat := policy.WordOf(&s.LogFormat, "text", "json")
	keys := []Key{
		{"resync_interval", Interval(&s.ResyncInterval), "TIME",
			"time between full verifications, in addition to events: 60s, 2m, or seconds"},
		{"backend", oneOf(backend), "BACKEND", "backend of chains without a stated one: auto, iptables or nftables"},
		{"cni_conf_dir", directory(&s.CNIConfDir, d.CNIConfDir), "DIR",
			"directory of the conflists that the container runtime reads"},
		{"cni_bin_dir", directory(&s.CNIBinDir, d.CNIBinDir), "DIR",
			"directory of the plugins that the container runtime runs"},
		{"agent_config_dir", text(&s.AgentConfigDir, "/etc/config", orEmpty(pathLike("/etc/config"))), "DIR",
			"directory of the agent files (ip-masq*), such as /etc/config (default: none)"},
		{"agent_dialect", oneOf(dialect), "DIALECT",
			"dialect of agent files: v1, or v2, in which a missing nonMasqueradeCIDRs is an empty list"},
		{"data_dir", dataDirectory(&s.DataDir), "DIR",
			"directory of the node's state, the same as dataDir of the plugin entries"},
		{"health_listen", text(&s.HealthListen, d.HealthListen, orEmpty(parseListen)), "HOST:PORT",
			"address of /livez, /healthz, /readyz, /statusz and /flagz; empty for off"},
		{"metrics_listen", text(&s.MetricsListen, ":9820", orEmpty(parseListen)), "HOST:PORT",
			"address of /metrics, such as :19821 (default: off)"},
		{"log_format", oneOf(logFormat), "FORMAT", "format of the log: text or json"},
		{agentTable, table(agentTable), "", ""},
	}
	for _, k := range s.Agent.Keys() {
		k.Name = agentTable + "." + k.Name
		keys = append(keys, k)
	}
	return append(keys,
		Key{conflistTable, table(conflistTable), "", ""},
		Key{"conflist.manage", boolean(&s.Conflist.Manage), "", "insert the plugin entry again when it is missing"},
		Key{"conflist.network", text(&s.Conflist.Network, "podnet", orEmpty(parseNetworkName)), "NETWORK",
			"network whose conflist gets the plugin entry (default: the one that the runtime uses)"},
		Key{"conflist.entry_file", directory(&s.Conflist.EntryFile, d.Conflist.EntryFile), "FILE",
			"file with the plugin entry to insert, as JSON"},
	)
}

// table accepts a table, whose keys are members of their own.
func table(name string) Value { return Value{Object, tableField(name)} }

type tableField string

func (f tableField) want() string {
	return "[" + string(f) + "] on a line of its own, and its keys below"
}

func (tableField) read(*Document, string, json.RawMessage) {}

func (tableField) text() string { return "" }

// Read reads reconciler.toml into the settings. Keys that are left out keep their values; an error, an
// fs.ErrNotExist or a DocumentError with every mistake, changes nothing. [agent] is validated on its own, as
// if IPv6 was enabled: agent files may enable it.
func (s *Settings) Read(path string) error {
	doc, _, err := safefile.ReadFile(path, maxTOMLSize)
	if err == nil {
		err = s.parse(path, doc)
	}
	return err
}

func (s *Settings) parse(path string, doc []byte) error {
	members, err := tomlMembers(path, doc, agentTable, conflistTable)
	if err != nil {
		return err
	}
	next := *s
	d := Document{File: path}
	d.Read(members, next.keys())
	d.Table = agentTable + "."
	next.Agent.Validate(&d, true)
	if err := d.Err(); err != nil {
		return err
	}
	next.Origins = map[string]string{}
	for _, m := range members {
		next.Origins[m.Key] = fmt.Sprintf("%s:%d", path, m.Line)
		next.AgentStated = next.AgentStated || m.Key == agentTable || strings.HasPrefix(m.Key, d.Table)
	}
	*s = next
	return nil
}

// List returns the settings, in the order of the documentation.
func (s Settings) List() []Setting {
	var list []Setting
	for _, k := range s.Flags() {
		list = append(list, Setting{k.Name, k.Text(), cmp.Or(s.Origins[k.Name], DefaultOrigin)})
	}
	return list
}

// SetAll sets the settings of a list, as Settings.List returned it, that are not defaults.
func (s *Settings) SetAll(list []Setting) error {
	for _, x := range list {
		if x.Origin == DefaultOrigin {
			continue
		}
		if err := s.Set(x.Key, x.Value); err != nil {
			return err
		}
		s.Origins[x.Key] = x.Origin
	}
	return nil
}

// Equal reports whether both state the same settings, regardless of where they state them.
func (s Settings) Equal(t Settings) bool {
	s.Origins, t.Origins = nil, nil
	return reflect.DeepEqual(s, t)
}

// AgentSource reports whether the agent files are a source: agent_config_dir, [agent] or one of its flags
// makes them one.
func (s *Settings) AgentSource() bool { return s.AgentConfigDir != "" || s.AgentStated }

// Flags returns the keys of the settings that are flags, in the order of the documentation.
func (s *Settings) Flags() []Key {
	return slices.DeleteFunc(s.keys(), func(k Key) bool { return k.Kind == Object })
}

// Set sets a key to the text of a flag: the value as in reconciler.toml, a list with commas between its
// items. It is validated on its own, as the other flags are not known yet. After an error the settings are
// unchanged.
func (s *Settings) Set(key, text string) error {
	d := Document{Indexes: map[string][]int{}}
	alone := Settings{Agent: AgentPolicy{CIDRLimit: policy.MaxCIDRLimit}}
	alone.set(&d, key, text)
	d.Table = agentTable + "."
	alone.Agent.Validate(&d, true)
	if err := d.Err(); err != nil {
		return err
	}
	s.set(&d, key, text) // which was valid
	s.AgentStated = s.AgentStated || strings.HasPrefix(key, d.Table)
	s.Origins = maps.Collect(maps.All(s.Origins)) // another map, and not nil
	s.Origins[key] = FlagOrigin
	return nil
}

func (s *Settings) set(d *Document, key, text string) {
	keys := s.keys()
	i := slices.IndexFunc(keys, func(k Key) bool { return k.Name == key })
	if i < 0 { // such as one of a newer reconciler, whose settings another program takes
		d.Fail(key, -1, "", "is not a known key")
		return
	}
	value, err := keys[i].fromFlag(text)
	if err != nil {
		d.Fail(key, -1, text, err.Error())
		return
	}
	keys[i].Read(d, key, value)
}
