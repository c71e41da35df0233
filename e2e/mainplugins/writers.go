// SPDX-License-Identifier: Apache-2.0

package mainplugins

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// Writer is a program that writes a main CNI plugin's conflist at its start, and removes nothing
// at its end.
type Writer struct {
	Name string
	// Source is the repository, commit and file that the row was read from.
	Source string
	File   string
	// Needs is the plugin in the conflist that needs a daemon or a cluster, or "".
	Needs    string
	Conflist string
	write    func(path string, text []byte) error
}

// Writers returns the writers. A further main CNI plugin is a further row.
func Writers() []Writer {
	return []Writer{
		// It writes again if the node's pod ranges change, and never compares with the file.
		{
			Name: "kindnetd", Source: "kubernetes-sigs/kind@b26553c42d73:images/kindnetd/cmd/kindnetd/cni.go",
			File: "10-kindnet.conflist", Conflist: kindnetd, write: renamed(".temp"),
		},
		// It compares again with each event of its Node object.
		{
			Name: "kindnet", Source: "kubernetes-sigs/kindnet@d9322c18645d:pkg/node/cni.go",
			File: "10-kindnet.conflist", Needs: "cni-kindnet", Conflist: kindnet, write: unlessEqual(removed),
		},
		{
			Name: "calico", Source: "projectcalico/calico@be170ab5d3b4:cni-plugin/pkg/install/install.go, projectcalico/calico@f874c4634a6d:cni-plugin/pkg/install/install_linux.go",
			File: "10-calico.conflist", Needs: "calico", Conflist: calico, write: inPlace(0o600),
		},
	}
}

// Start writes the conflist into a configuration directory, as the program does at its start.
func (w Writer) Start(dir string) error {
	return w.write(filepath.Join(dir, w.File), []byte(w.Conflist))
}

// renamed writes a file of the same directory and renames it.
func renamed(suffix string) func(string, []byte) error {
	return func(path string, text []byte) error {
		return errors.Join(os.WriteFile(path+suffix, text, 0o644), os.Rename(path+suffix, path))
	}
}

// inPlace truncates the file: a reader sees none of the text, or a part of it, for a moment.
func inPlace(mode fs.FileMode) func(string, []byte) error {
	return func(path string, text []byte) error {
		return errors.Join(os.WriteFile(path, text, mode), os.Chmod(path, mode))
	}
}

// removed removes the file first.
func removed(path string, text []byte) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return inPlace(0o644)(path, text)
}

// unlessEqual writes only if the file has another text, as it has with the plugin entry.
func unlessEqual(write func(string, []byte) error) func(string, []byte) error {
	return func(path string, text []byte) error {
		if doc, err := os.ReadFile(path); err == nil && bytes.Equal(doc, text) {
			return nil
		}
		return write(path, text)
	}
}

const kindnetd = `
{
	"cniVersion": "0.3.1",
	"name": "kindnet",
	"plugins": [
	{
		"type": "ptp",
		"ipMasq": false,
		"ipam": {
			"type": "host-local",
			"dataDir": "/run/cni-ipam-state",
			"routes": [
				{ "dst": "0.0.0.0/0" },
				{ "dst": "::/0" }
			],
			"ranges": [
				[ { "subnet": "10.244.0.0/24" } ],
				[ { "subnet": "fd00:10:244::/64" } ]
			]
		},
		"mtu": 1500
	},
	{
		"type": "portmap",
		"capabilities": {
			"portMappings": true
		}
	}
	]
}
`

const kindnet = `{
  "cniVersion": "0.4.0",
  "name": "kindnet",
  "plugins": [
    {
      "type": "cni-kindnet",
      "ranges": [
        "10.244.0.0/24",
        "fd00:10:244::/64"
      ],
      "capabilities": {"portMappings": true}
    }
  ]
}
`

const calico = `{
  "name": "k8s-pod-network",
  "cniVersion": "1.0.0",
  "plugins": [
    {
      "type": "calico",
      "log_level": "info",
      "log_file_path": "/var/log/calico/cni/cni.log",
      "datastore_type": "kubernetes",
      "nodename": "node",
      "mtu": 0,
      "ipam": {"type": "calico-ipam"},
      "policy": {"type": "k8s"},
      "kubernetes": {"kubeconfig": "/etc/cni/net.d/calico-kubeconfig"},
      "require_mtu_file": false,
      "calico_api_group": "crd.projectcalico.org/v1"
    },
    {
      "type": "portmap",
      "snat": true,
      "capabilities": {"portMappings": true}
    }
  ]
}`
