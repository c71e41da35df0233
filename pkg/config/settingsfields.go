// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"strconv"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Field is one key of the settings, for a flag.
type Field struct {
	Key   string // resync_interval, agent.masqChain, conflist.manage
	Usage string // one line; in backquotes what stands for the value
	Bool  bool   // true or false, so that a flag needs no value

	// Value returns what the settings have now, as text; "" where nothing is
	// stated.
	Value func() string

	// Set takes a flag's text: what the file would have there, a list with
	// commas between its items. It is judged as in the file, but by itself.
	// After an error the settings are what they were.
	Set func(text string) error
}

// Fields returns every key of the settings, once, in the order of the file.
func (s *Settings) Fields() []Field {
	var fields []Field
	for _, table := range settingsTables() {
		for i, k := range new(Settings).table(table) {
			fields = append(fields, s.field(table, i, k.Name))
		}
	}
	return fields
}

func (s *Settings) field(table string, nth int, name string) Field {
	prefix := tablePrefix(table)
	shape := shapeOf(new(Settings).table(table)[nth])
	return Field{
		Key:   prefix + name,
		Usage: usageOf(prefix + name),
		Bool:  shape == Boolean,
		Value: func() string { return s.values(table)[name] },
		Set: func(text string) error {
			next := s.clone()
			f := Document{Table: prefix}
			f.setText(next.table(table)[nth], shape, text)
			if table == agentTable {
				delete(next.Agent.Written.Lines, name)
				delete(next.Agent.Written.Indexes, name)
				// What is wrong beside the other keys is not known before all flags are read.
				var alone AgentPolicy
				new(Document).setText(alone.Keys()[nth], shape, text)
				alone.CIDRLimit = policy.MaxCIDRLimit
				alone.Validate(&f, true)
			}
			switch len(f.Mistakes) {
			case 0:
				*s = next
				return nil
			case 1:
				return f.Mistakes[0]
			}
			return f.Err()
		},
	}
}

// shapeOf tells what kind of value a key has. Its reader stores samples.
func shapeOf(k Key) Kind {
	switch {
	case Takes(k, "true"):
		return Boolean
	case Takes(k, "[]"):
		return List
	case Takes(k, "1") && !Takes(k, `"1"`):
		return Number
	}
	return String
}

// setText reads a flag's text as a value of that kind.
func (f *Document) setText(k Key, shape Kind, text string) {
	var value any
	switch shape {
	case Boolean:
		b, err := strconv.ParseBool(text) // as the agents read theirs
		if err != nil {
			f.Fail(k.Name, -1, text, "is neither true nor false; write one of them")
			return
		}
		value = b
	case Number:
		n, err := strconv.Atoi(text)
		if err != nil {
			f.Fail(k.Name, -1, text, "is not a whole number; write one")
			return
		}
		value = n
	case List:
		items := []string{}
		if strings.TrimSpace(text) != "" {
			for item := range strings.SplitSeq(text, ",") {
				items = append(items, strings.TrimSpace(item))
			}
		}
		value = items
	default:
		value = text
	}
	written, err := json.Marshal(value)
	if err != nil {
		f.Fail(k.Name, -1, text, "has no form in JSON: "+policy.Printable(err.Error()))
		return
	}
	k.Read(f, k.Name, written)
}

// briefly writes a minute as 1m, not as 1m0s.
func briefly(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	return text
}

// values returns what a table has now, as text by key.
func (s *Settings) values(table string) map[string]string {
	switch table {
	case topTable:
		return map[string]string{
			"resync_interval": briefly(s.ResyncInterval), "backend": string(s.Backend),
			"cni_conf_dir": s.CNIConfDir, "cni_bin_dir": s.CNIBinDir,
			"agent_config_dir": s.AgentConfigDir, "agent_dialect": string(s.AgentDialect),
			"data_dir": s.DataDir, "health_listen": s.HealthListen, "metrics_listen": s.MetricsListen,
			"log_format": s.LogFormat,
		}
	case conflistTable:
		return map[string]string{
			"manage": strconv.FormatBool(s.Conflist.Manage), "network": s.Conflist.Network,
			"entry_file": s.Conflist.EntryFile,
		}
	}
	if s.Agent == nil {
		return nil
	}
	return s.Agent.values()
}

// values takes the fields by their names in JSON, which are the keys.
func (a *AgentPolicy) values() map[string]string {
	values := map[string]string{}
	if a.CIDRLimit != 0 {
		values["cidrLimit"] = strconv.Itoa(a.CIDRLimit)
	}
	text, err := json.Marshal(a.Policy)
	if err != nil {
		return values // only help is the poorer for it
	}
	parts := Elements(text)
	for i := 0; i+1 < len(parts); i += 2 {
		name, _ := StringValue(parts[i])
		values[name] = plainText(parts[i+1])
	}
	return values
}

// plainText writes a value as a flag takes it.
func plainText(value json.RawMessage) string {
	if s, isString := StringValue(value); isString {
		return s
	}
	if KindOf(value) != List {
		return string(value)
	}
	var items []string
	for _, item := range Elements(value) {
		items = append(items, plainText(item))
	}
	return strings.Join(items, ",")
}
