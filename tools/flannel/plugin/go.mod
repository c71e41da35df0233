module github.com/ip-masq/ip-masq-cni/tools/flannel/plugin

go 1.26

tool github.com/containernetworking/plugins/plugins/meta/flannel

require (
	github.com/containernetworking/cni v1.3.1 // indirect
	github.com/containernetworking/plugins v0.9.1 // indirect
	github.com/vishvananda/netns v0.0.4 // indirect
	go.opentelemetry.io/otel v1.29.0 // indirect
	go.opentelemetry.io/otel/trace v1.29.0 // indirect
	golang.org/x/sys v0.23.0 // indirect
)
