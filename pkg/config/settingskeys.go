// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// The tables of the reconciler's file. The keys of the first have no table.
const (
	topTable      = ""
	agentTable    = "agent"
	conflistTable = "conflist"
)

func settingsTables() []string { return []string{topTable, agentTable, conflistTable} }

// tablePrefix is what stands before a table's keys in messages and flags.
func tablePrefix(table string) string {
	if table == topTable {
		return ""
	}
	return table + "."
}

// table returns the keys of one table, each with what reads its value into the
// settings. Asking for those of [agent] makes it stated.
func (s *Settings) table(name string) []Key {
	dir := func(to *string, example string) reader {
		return text(example, pathLike(example), func(path string) { *to = path })
	}
	into := func(to *string, example string, parse func(string) (string, error)) reader {
		return text(example, parse, func(value string) { *to = value })
	}
	d := DefaultSettings()
	switch name {
	case topTable:
		return []Key{
			{"resync_interval", Interval(&s.ResyncInterval)},
			{"backend", text(string(d.Backend), parseBackend, func(b policy.Backend) { s.Backend = b })},
			{"cni_conf_dir", dir(&s.CNIConfDir, d.CNIConfDir)},
			{"cni_bin_dir", dir(&s.CNIBinDir, d.CNIBinDir)},
			{"agent_config_dir", into(&s.AgentConfigDir, "/etc/config", orEmpty(pathLike("/etc/config")))},
			{"agent_dialect", text(string(DialectV1), oneOf(DialectV1, DialectV2), func(v Dialect) { s.AgentDialect = v })},
			{"data_dir", dir(&s.DataDir, d.DataDir)},
			{"health_listen", into(&s.HealthListen, d.HealthListen, orEmpty(parseListen))},
			{"metrics_listen", into(&s.MetricsListen, ":9820", orEmpty(parseListen))},
			{"log_format", into(&s.LogFormat, d.LogFormat, oneOf("text", "json"))},
		}
	case agentTable:
		if s.Agent == nil {
			s.Agent = new(AgentPolicy)
		}
		return s.Agent.Keys()
	case conflistTable:
		return []Key{
			{"manage", boolean(func(b bool) { s.Conflist.Manage = b })},
			{"network", into(&s.Conflist.Network, "podnet", orEmpty(parseNetworkName))},
			{"entry_file", dir(&s.Conflist.EntryFile, d.Conflist.EntryFile)},
		}
	}
	return nil
}

// orEmpty takes "" for what is switched off, or left to others.
func orEmpty(parse func(string) (string, error)) func(string) (string, error) {
	return func(s string) (string, error) {
		if s == "" {
			return "", nil
		}
		return parse(s)
	}
}

func oneOf[T ~string](choices ...T) func(string) (T, error) {
	return func(s string) (T, error) {
		var all []string
		for _, c := range choices {
			if string(c) == s {
				return c, nil
			}
			all = append(all, string(c))
		}
		write := "write " + strings.Join(all, " or ")
		if s == "" {
			return "", errors.New("is empty; " + write + ", or leave the key out")
		}
		return "", errors.New("is not one of the choices; " + write)
	}
}

// parseListen reads the address of a listener: HOST:PORT, where no host is every
// address of the node, and port 0 is one that the kernel chooses.
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
	if net.ParseIP(address) == nil && (zone != "" || strings.ContainsFunc(host, notInHostName)) {
		return "", errors.New("has no host that can be listened on; " + write)
	}
	return s, nil
}

func notInHostName(r rune) bool {
	alphanumeric := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
	return !alphanumeric && r != '-' && r != '.' && r != '_'
}
